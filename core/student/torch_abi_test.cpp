#include "core/student/torch_abi.h"

#include <ATen/ATen.h>

#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(TorchAbi, AlignedCopiesOnlyWhatIsNot) {
  const at::Tensor whole = at::arange(40, at::kFloat);
  EXPECT_TRUE(aligned(whole).is_same(whole));
  const at::Tensor part = whole.narrow(0, 1, 20), copy = aligned(part);
  EXPECT_NE(copy.data_ptr(), part.data_ptr());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(copy.data_ptr()) % 64, 0u);
  EXPECT_TRUE(at::equal(copy, part));
  EXPECT_FALSE(aligned({}).defined());
}

class HostGemm : public testing::Test {
 protected:
  graft_status gemm(const at::Tensor& a, const at::Tensor& b, double beta, const at::Tensor& c,
                    bool trans_a = false) {
    error_ = {};
    error_.struct_size = sizeof error_;
    BorrowedTensor left(a), right(b), out(c);
    return torch_host_blas()->gemm(nullptr, trans_a ? 1 : 0, 0, 2, left.get(), right.get(), beta,
                                   out.get(), nullptr, &error_);
  }
  void expect_refused(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                      const std::string& message) {
    EXPECT_EQ(gemm(a, b, 0, c), GRAFT_INVALID_ARGUMENT);
    EXPECT_STREQ(error_.where, "host-blas.gemm");
    EXPECT_EQ(error_.message, message);
  }
  graft_error error_{};
};

TEST_F(HostGemm, MatricesAndBatchesOfThem) {
  const at::Tensor a = at::randn({3, 2}), b = at::randn({3, 4}), c = at::randn({2, 4});
  const at::Tensor expected = 2 * at::matmul(a.t(), b) + 0.5 * c;
  ASSERT_EQ(gemm(a, b, 0.5, c, true), GRAFT_OK) << error_.message;
  EXPECT_TRUE(at::allclose(c, expected));
  const at::Tensor left = at::randn({2, 3, 5}), right = at::randn({2, 5, 4}),
                   out = at::full({2, 3, 4}, NAN);
  ASSERT_EQ(gemm(left, right, 0, out), GRAFT_OK) << error_.message;
  EXPECT_TRUE(at::allclose(out, 2 * at::bmm(left, right))) << "beta 0: c is not read";
  const at::Tensor nothing = at::full({2, 3}, 5.0);
  ASSERT_EQ(gemm(at::zeros({2, 0}), at::zeros({0, 3}), 2, nothing), GRAFT_OK) << error_.message;
  EXPECT_TRUE(at::equal(nothing, at::full({2, 3}, 10.0))) << "k = 0: c = beta c";
}

TEST_F(HostGemm, Float32AndBfloat16Mix) {
  const at::Tensor a = at::randn({3, 2}).to(at::kBFloat16), b = at::randn({2, 4});
  const at::Tensor expected = 2 * at::matmul(a.to(at::kFloat), b);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor c = at::empty({3, 4}, type);
    ASSERT_EQ(gemm(a, b, 0, c), GRAFT_OK) << error_.message;
    EXPECT_TRUE(at::equal(c, expected.to(type))) << type;
  }
}

TEST_F(HostGemm, WhatIsNoProductIsRefused) {
  const at::Tensor m = at::ones({2, 2}), v = at::ones({2}), batch = at::ones({3, 2, 2});
  expect_refused(v, m, m, "a, b and c are 1-D, 2-D and 2-D; expected all 2-D or all 3-D");
  expect_refused(batch, m, batch, "a, b and c are 3-D, 2-D and 3-D; expected all 2-D or all 3-D");
  expect_refused(at::ones({1, 2, 2}), batch, batch,
                 "the batches of a, b and c are 1, 3 and 3; expected equal ones: nothing is "
                 "broadcast");
  expect_refused(m.to(at::kDouble), m, m,
                 "a, b and c are Double, Float and Float; expected all float64, or each of them "
                 "float32 or bfloat16");
  expect_refused(m, m, m.to(at::kHalf),
                 "a, b and c are Float, Float and Half; expected all float64, or each of them "
                 "float32 or bfloat16");
  expect_refused(m, m, at::ones({2, 3}), "the shapes of a, b and c do not fit");
  EXPECT_EQ(gemm(at::Tensor(), m, 0, m), GRAFT_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace graft
