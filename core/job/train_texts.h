#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/job/train_job.h"
#include "core/text/corpus.h"
#include "core/train/sampler.h"

namespace graft {

// The texts of a run, split.
struct TrainTexts {
  std::vector<Corpus> corpora;         // keep the mapped tokens alive
  std::vector<WeightedText> training;  // one for each corpus
  std::vector<Document> calibration;   // the same documents, for initializers
  std::vector<std::int32_t> held_out;  // empty: nothing is measured
  std::string held_out_name;           // how it was chosen
  std::string leak;                    // a warning, where a piece of it is trained on too
  std::int64_t training_tokens = 0;
  std::map<std::string, std::string> hashes;  // "corpus 0" -> the content's hash
};

// Reads the corpora, holds out what the job says and checks that a training corpus is not
// evaluation text too. Throws Error(input).
TrainTexts load_train_texts(const TrainJob& job, const Tokenizer& tokenizer);

}  // namespace graft
