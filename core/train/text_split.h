#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/text/corpus.h"

namespace graft {

struct TextSplit {
  std::vector<Document> training, held_out;
  std::string how;  // one sentence for the reader
};

// Holds out about `share` of the documents, at least one and never all; they are drawn by seed and
// content, so that neither names nor the order of files matter. Of a single document the tail is
// held out. share = 0 holds out nothing.
TextSplit split_documents(const std::vector<Document>& documents, double share, std::uint64_t seed);

}  // namespace graft
