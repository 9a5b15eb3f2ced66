#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/abi/options.h"
#include "core/student/model.h"
#include "core/text/corpus.h"
#include "core/train/calibrate.h"

namespace graft {

class PluginRegistry;

// A plugin by id or alias and the options given for it (the schema's defaults fill the rest).
struct PluginChoice {
  std::string name;
  std::map<std::string, OptionValue> options;
};

// Which stream the layers are converted on.
struct StreamOptions {
  // false: on the teacher's own; each layer then stands alone. true: on what the student's
  // converted layers before it give, so that a layer can make good some of their error.
  bool student = false;
  double correction = 1;  // share of the stream's error that is added to a layer's target
  double lost = 0.5;      // ... but not where the error is more than this share of the stream
  // > 0: the MLPs' output projections are corrected toward the teacher's stream too, by least
  // squares with this ridge (in means of the Gram matrix' diagonal).
  double mlp_ridge = 0;
};

// One way to make a student: a mixer, its initializer and, if wanted, the calibration after it.
struct Recipe {
  std::string label;  // the row's name in tables; the initializer's alias unless it is a baseline
  PluginChoice mixer;
  PluginChoice init;
  std::int64_t init_tokens = 16384;  // calibration tokens the initializer sees
  std::int64_t window = 256;         // tokens in one calibration sequence
  StreamOptions stream;
  bool calibrate = true;
  CalibrateOptions stage;
};

struct ConvertSeconds {
  double teacher = 0;    // the teacher's passes that made the signals, the initializer's share
  double init = 0;       // the initializer itself
  double calibrate = 0;  // the stage, with the teacher's passes over the tokens only it sees
};

// What converting one layer gave. On the teacher's stream each stands alone and a student may use
// any subset of them; on the student's they belong together.
struct ConvertedLayer {
  std::shared_ptr<TokenMixer>
      mixer;  // after calibration, or after initialisation when there is none
  std::shared_ptr<TokenMixer>
      initialised;  // a copy from before calibration; null when there is none
  ConvertSeconds seconds;
  CalibrateReport report;
};

struct Conversion {
  std::map<int, ConvertedLayer> layers;
  std::map<std::string, at::Tensor> backbone;  // parameters of the backbone that were corrected
  std::int64_t init_tokens = 0;                // tokens the initializer saw
  std::int64_t calibrate_tokens = 0;  // tokens calibration saw, those of the initializer included
  double seconds(bool after_calibration, const std::vector<int>& layers) const;
};

struct ConvertHooks {
  std::function<void(int layer, const std::string& note)> layer_done;  // may be empty
  StopCheck should_stop;
};

// Checks, without reading a weight, that the recipe's initializer and mixer fit each other: the
// roles the initializer needs are among the mixer's, the teacher's roles among the family's. Throws
// Error(plugin).
void check_recipe(PluginRegistry& registry, const Recipe& recipe, const ModelConfig& teacher);

// The documents that hold a calibration window; how many do not is logged. Throws Error(input) when
// none does.
std::vector<Document> long_enough(const std::vector<Document>& documents, std::int64_t window);

// Calibration sequences [N, window] i64 of the documents that are long_enough: window i is from
// document i mod n at a place drawn by seed, all of them different as far as the documents go. Of
// more documents than windows, those that are read are spread over all of them, and so are the
// documents of the first few windows, which are all that an initializer may see.
at::Tensor calibration_windows(const std::vector<Document>& documents, std::int64_t count,
                               std::int64_t window, std::uint64_t seed);

// Converts `layers` of the teacher layer by layer. Only the residual stream of the calibration
// tokens is held (the student's beside it where the layers are converted on that): layer l is
// converted on it, then it is advanced through layer l. No graph spans layers. Throws Error;
// Error(interrupted) when should_stop says so.
Conversion convert(PluginRegistry& registry, const Backbone& teacher, const Recipe& recipe,
                   const std::vector<int>& layers, const std::vector<Document>& text,
                   std::uint64_t seed, const ConvertHooks& hooks);

}  // namespace graft
