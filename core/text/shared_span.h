#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/text/corpus.h"

namespace graft {

// Texts that share so many tokens in a row are the same text in that place. Shorter runs occur by
// chance ("CHAPTER I", stock phrases).
inline constexpr std::int64_t kSharedSpan = 32;

// The document of `trained` in which a run of kSharedSpan tokens ends that also stands in a part of
// the evaluated text: figures would then be worth nothing. Null when there is none. Documents count
// as one stream, so that short ones do too. Linear time.
const Document* sharing_document(const std::vector<Document>& trained,
                                 const std::vector<std::span<const std::int32_t>>& evaluated);

}  // namespace graft
