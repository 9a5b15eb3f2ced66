// A batch of sequences as the host gives it: padding, positions, and tensors of the call's dtype as
// rows of numbers.
#pragma once

#include <cstdint>

#include "graft/graft.h"
#include "rope.h"

namespace graft::mixers {

// B rows of T tokens. A padded token is as if it were not there.
struct Tokens {
  int64_t batch = 0, length = 0;
  const uint8_t* mask = nullptr;       // [B,T], 0 = padding; nullptr: all real
  const int64_t* positions = nullptr;  // [B,T]; nullptr: real tokens are counted from next_position

  int64_t count() const { return batch * length; }
  bool real(int64_t token) const { return mask == nullptr || mask[token] != 0; }
};

// The call's tokens; a mask without a padded token is no mask.
Tokens tokens_of(const graft_mixer_forward& call);

// The elements of a [B,T,width] tensor of float32, float64 or bfloat16 with any strides, padded
// tokens as 0 (they may be NaN): the tensor's own memory where that is it already, else copied into
// `space` of [B,T,width].
template <class T>
const T* rows_of(const DLTensor& tensor, const Tokens& tokens, T* space);

// The same the other way: from [B,T,..] numbers to a contiguous tensor of the call's dtype, padded
// tokens as 0. `from` may be the tensor's memory.
template <class T>
void store_rows(const Tokens& tokens, const T* from, DLTensor& tensor);

// Whether the tensor's own memory can hold rows of T.
template <class T>
bool holds(const DLTensor& tensor);

// Rows of padded tokens become 0.
template <class T>
void clear_pads(const Tokens& tokens, int64_t width, T* rows);

// values += the tensor's, at real tokens; nullptr: nothing. `values` [B,T,..] has as many elements.
template <class T>
void add_tensor(const DLTensor* tensor, const Tokens& tokens, T* values);

// The place of each token [B,T], and where each sequence goes on: one past its last real token, or
// as it was where a row has none. next_in nullptr: 0; next_out may be nullptr or next_in.
void find_positions(const Tokens& tokens, const int64_t* next_in, int64_t* positions,
                    int64_t* next_out);

// cos and sin [B,T,frequencies] of the angles positions * inv_freq, times the factor. Angles are
// float64.
template <class T>
void rotation_tables(const Rope& rope, int64_t tokens, const int64_t* positions, T* cos, T* sin);

}  // namespace graft::mixers
