#include "core/job/train_texts.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/text/shared_span.h"
#include "core/train/text_split.h"

namespace graft {
namespace {

void append(std::vector<std::int32_t>& tokens, const std::vector<Document>& documents) {
  for (const Document& document : documents)
    tokens.insert(tokens.end(), document.tokens.begin(), document.tokens.end());
}

std::string name_of(const CorpusChoice& choice) {
  return choice.paths.front().string() +
         (choice.paths.size() > 1 ? " and " + std::to_string(choice.paths.size() - 1) + " more"
                                  : "");
}

void refuse_equal_files(const Corpus& held_out, const std::vector<Corpus>& training) {
  for (const Corpus::Source& evaluated : held_out.sources())
    for (const Corpus& corpus : training)
      for (const Corpus::Source& trained : corpus.sources())
        if (evaluated.sha256 == trained.sha256)
          fail(ErrorKind::input, "evaluation text " + quoted(evaluated.path.string()) +
                                     " is training text too (" + quoted(trained.path.string()) +
                                     " has the same content): give another eval_text, or none, "
                                     "and some is held out");
}

// Of what is measured, not of all that is held out. A warning and no error: documents of one source
// share boilerplate.
std::string leak_in(const TrainTexts& texts, const PerplexityOptions& eval) {
  std::vector<Document> trained;
  for (const WeightedText& text : texts.training)
    for (const auto& tokens : text.documents) trained.push_back({text.name, tokens});
  std::span<const std::int32_t> measured = texts.held_out;
  const auto most = static_cast<std::size_t>(eval.windows * eval.context);
  if (most > 0 && most < measured.size()) measured = measured.first(most);
  const Document* shared = sharing_document(trained, {measured});
  if (shared == nullptr) return {};
  return "training and evaluation text share a run of " + std::to_string(kSharedSpan) +
         " tokens (in " + quoted(shared->name) +
         "): there the figures are of what was trained on; evaluated is " + texts.held_out_name;
}

Corpus open(const std::vector<std::filesystem::path>& paths, const Tokenizer& tokenizer,
            const std::string& field) {
  CorpusOptions options;
  options.jsonl_field = field;
  return Corpus::open(paths, tokenizer, options);
}

}  // namespace

TrainTexts load_train_texts(const TrainJob& job, const Tokenizer& tokenizer) {
  TrainTexts texts;
  const bool split = job.eval_text.empty();
  for (const CorpusChoice& choice : job.corpora) {
    const Corpus& corpus = texts.corpora.emplace_back(open(choice.paths, tokenizer, choice.field));
    TextSplit parts = split_documents(corpus.documents(), split ? job.held_out : 0);
    WeightedText text{name_of(choice), {}, choice.weight};
    for (const Document& document : parts.training) {
      text.documents.push_back(document.tokens);
      texts.training_tokens += static_cast<std::int64_t>(document.tokens.size());
      if (choice.weight > 0) texts.calibration.push_back(document);
    }
    texts.training.push_back(std::move(text));
    append(texts.held_out, parts.held_out);
    if (split && job.held_out > 0)
      texts.held_out_name += (texts.held_out_name.empty() ? "" : "; ") + parts.how;
    texts.hashes["corpus " + std::to_string(texts.corpora.size() - 1)] = corpus.content_hash();
  }
  if (!job.eval_text.empty()) {
    const Corpus evaluated = open(job.eval_text, tokenizer, job.corpora.front().field);
    refuse_equal_files(evaluated, texts.corpora);
    append(texts.held_out, evaluated.documents());
    texts.held_out_name = job.eval_text.front().filename().string();
    if (job.eval_text.size() > 1)
      texts.held_out_name += " and " + std::to_string(job.eval_text.size() - 1) + " more";
    texts.hashes["evaluation"] = evaluated.content_hash();
  }
  texts.leak = leak_in(texts, job.eval);
  return texts;
}

}  // namespace graft
