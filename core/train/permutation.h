#pragma once

#include <cstdint>

namespace graft {

// The finaliser of splitmix64: every bit of the input moves every bit of the output.
std::uint64_t mix_bits(std::uint64_t value);

// Place i of n in an order drawn by `key`: for i = 0 .. n-1 each of 0 .. n-1 once. Computed from i
// alone (a Feistel network walked until it falls below n), so that a position in an epoch is one
// number and no order has to be stored. n > 0 and i < n.
std::uint64_t permuted(std::uint64_t i, std::uint64_t n, std::uint64_t key);

}  // namespace graft
