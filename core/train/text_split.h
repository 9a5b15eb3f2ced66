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

// Holds out about `share` of the documents, at least one and never all; they are drawn by their
// content, so that neither names, the order of files nor a run's seed matter: what one run holds out
// no other trains on. Equal documents are on one side. Of a single document the tail is held out.
// share = 0 holds out nothing.
TextSplit split_documents(const std::vector<Document>& documents, double share);

}  // namespace graft
