// What this machine can do at most, measured with each instruction set.
#pragma once

#include <cstdint>
#include <string_view>

namespace graft::bench {

struct Limits {
  const char* isa;
  // `rounds` times as many independent float32 multiply-adds as the registers hold; returns the
  // floating-point operations done and stores something that depends on all of them.
  double (*multiply_add)(int64_t rounds, float* sink);
};

const Limits& limits();

}  // namespace graft::bench
