#include "machine.h"
#include "vector-inl.h"

namespace graft::bench::GRAFT_ISA {
namespace {

using namespace kernels::GRAFT_ISA;

double multiply_add(int64_t rounds, float* sink) {
  constexpr int kSums = 12;
  Vector<float> sums[kSums] = {}, factor = Vector<float>{} + 0.999f,
                addend = Vector<float>{} + sink[0];
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) sums[j] = sums[j] * factor + addend;
  }
  Vector<float> all = {};
  for (int j = 0; j < kSums; ++j) all += sums[j];
  sink[0] = sum<float>(all);
  return 2.0 * kSums * static_cast<double>(kLanes<float> * rounds);
}

}  // namespace

extern const Limits kTable;
const Limits kTable = {GRAFT_ISA_NAME, multiply_add};

}  // namespace graft::bench::GRAFT_ISA
