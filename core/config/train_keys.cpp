#include "core/config/train_keys.h"

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/config/keys.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;
constexpr double most_tokens = 1e15;
constexpr double most_steps = 1e12;

// The keys that mean the same in the main job.
std::vector<Key> shared_keys() {
  std::vector<Key> keys;
  for (const char* name :
       {"teacher", "text", "text_field", "eval_text", "out", "force", "seed", "threads",
        "plugin_path", "eval.windows", "eval.context", "eval.stride", "eval.bos"}) {
    keys.push_back(*graft_schema().find_key(name));
  }
  return keys;
}

std::vector<Key> run_keys() {
  return {
      {.name = "student",
       .default_value = "",
       .doc = "a student of the teacher's to go on from; empty = the first stage makes one",
       .synonyms = {"start", "from", "model"},
       .placeholder = "DIR"},
      {.name = "keep_attention",
       .default_value = "none",
       .doc = "layers that keep their attention: none, uniform:K, 0,4,8-11 or the FILE.json of "
              "select-layers",
       .synonyms = {"keep", "attention_layers"},
       .placeholder = "LAYERS"},
      {.name = "scale",
       .default_value = "",
       .doc = "which [scales.NAME] stands over the recipe's own values; several with commas "
              "between, the later over the earlier"},
      {.name = "budget",
       .default_value = 0,
       .doc = "tokens of the whole run, for stages that have a share of it",
       .min = 0,
       .max = most_tokens,
       .synonyms = {"tokens", "total_tokens"}},
      {.name = "held_out",
       .default_value = 0.1,
       .doc = "share of the documents that is held out for evaluation when there is no eval_text",
       .min = 0,
       .max = 0.9},
      {.name = "checkpoint.every",
       .default_value = 100,
       .doc = "steps between two checkpoints, 0 = at the end of each stage only",
       .min = 0,
       .max = most_steps},
      {.name = "checkpoint.keep",
       .default_value = 2,
       .doc = "how many of the last checkpoints stay; the best one stays too",
       .min = 1,
       .max = 1e6},
  };
}

Schema corpus_row() {
  return {.keys = {{.name = "path",
                    .default_value = Strings{},
                    .doc = ".txt and .jsonl files, or folders of them",
                    .synonyms = {"text", "file", "files"},
                    .required = true},
                   {.name = "weight",
                    .default_value = 1.0,
                    .doc = "its share of the training tokens, against the other corpora's",
                    .min = 0},
                   {.name = "field",
                    .default_value = "text",
                    .doc = "the field of a .jsonl line that holds its text"}},
          .tables = {},
          .rows = {}};
}

Schema objective_row() {
  return {.keys = {{.name = "name",
                    .default_value = "",
                    .doc = "the objective plugin",
                    .required = true},
                   {.name = "weight",
                    .default_value = 1.0,
                    .doc = "its factor in the stage's loss",
                    .min = 0}},
          .tables = {{.name = "options", .doc = "the objective's options", .type = {}}},
          .rows = {}};
}

Schema group_row() {
  return {.keys = {{.name = "match",
                    .default_value = Strings{},
                    .doc = "which parameters: selectors as in train",
                    .synonyms = {"parameters", "roles"},
                    .required = true},
                   {.name = "lr",
                    .default_value = -1.0,
                    .doc = "their learning rate; negative = the stage's",
                    .synonyms = {"learning_rate"}},
                   {.name = "weight_decay",
                    .default_value = -1.0,
                    .doc = "their weight decay; negative = the stage's",
                    .synonyms = {"decay", "wd"}}},
          .tables = {},
          .rows = {}};
}

std::vector<Key> stage_start_keys() {
  return {
      {.name = "name", .default_value = "", .doc = "what messages call it", .required = true},
      {.name = "scope",
       .default_value = "layer",
       .doc = "layer: each converted block alone on the teacher's input; model: end to end",
       .one_of = {"layer", "model"}},
      {.name = "mixer.name",
       .default_value = "",
       .doc = "the mixer from this stage on; empty = the one there is"},
      {.name = "init.name", .default_value = "", .doc = "what fills the new mixer"},
      {.name = "init.source",
       .default_value = "teacher",
       .doc = "whose parameters it reads: the teacher's, or those of the stage before",
       .one_of = {"teacher", "student"}},
      {.name = "init.tokens",
       .default_value = 16384,
       .doc = "calibration tokens the initializer sees",
       .min = 0,
       .max = most_tokens},
      {.name = "init.window",
       .default_value = 256,
       .doc = "tokens in one sequence of them",
       .min = 1,
       .max = 1 << 20},
  };
}

std::vector<Key> stage_length_keys() {
  return {
      {.name = "steps",
       .default_value = 0,
       .doc = "optimizer steps; 0 = as many as tokens allow",
       .min = 0,
       .max = most_steps,
       .synonyms = {"max_steps", "num_steps", "iterations"}},
      {.name = "tokens",
       .default_value = 0,
       .doc = "tokens to train on, in place of steps",
       .min = 0,
       .max = most_tokens},
      {.name = "share",
       .default_value = -1.0,
       .doc =
           "part of the run's budget to train on, in place of both; with 0 the stage is its start "
           "alone",
       .min = -1,
       .max = 1},
      {.name = "batch",
       .default_value = 4,
       .doc = "sequences in one forward pass",
       .min = 1,
       .max = 1 << 20,
       .synonyms = {"batch_size", "micro_batch"}},
      {.name = "context",
       .default_value = 256,
       .doc = "tokens in a sequence",
       .min = 2,
       .max = 1 << 24,
       .synonyms = {"window", "sequence_length", "seq_len", "context_length"}},
      {.name = "accumulate",
       .default_value = 1,
       .doc = "forward passes in one optimizer step",
       .min = 1,
       .max = 1 << 20,
       .synonyms = {"accumulation", "grad_accum", "gradient_accumulation_steps"}},
      {.name = "pool",
       .default_value = 0,
       .doc = "tokens of text the stage draws from, again and again; 0 = all of it",
       .min = 0,
       .max = most_tokens},
      {.name = "eval_every",
       .default_value = 0,
       .doc = "steps between two measurements on held-out text; 0 = at the end only",
       .min = 0,
       .max = most_steps},
      {.name = "checkpoint_every",
       .default_value = -1,
       .doc = "in place of checkpoint.every; negative = that one",
       .min = -1,
       .max = most_steps},
  };
}

std::vector<Key> stage_training_keys() {
  return {
      {.name = "train",
       .default_value = Strings{"mixers"},
       .doc = "what trains: all, mixers, attention, mlp, norms, embeddings, head, role:ROLE or "
              "name:NAME (* stands for any text); - before one takes it out again",
       .synonyms = {"trainable", "trains"}},
      {.name = "lr",
       .default_value = 1e-3,
       .doc = "AdamW's learning rate",
       .min = 0,
       .synonyms = {"learning_rate"}},
      {.name = "betas",
       .default_value = std::vector<double>{0.9, 0.999},
       .doc = "AdamW's two decay rates",
       .min = 0,
       .max = 1},
      {.name = "weight_decay",
       .default_value = 0.01,
       .doc = "AdamW's, for parameters that take decay",
       .min = 0,
       .synonyms = {"decay", "wd"}},
      {.name = "clip",
       .default_value = 1.0,
       .doc = "largest norm of the gradient (of each layer's, in layer scope), 0 = no limit",
       .min = 0,
       .synonyms = {"grad_clip", "max_grad_norm", "clip_norm"}},
      {.name = "schedule",
       .default_value = "cosine",
       .doc = "of the learning rate; wsd = warm up, stay, decay",
       .one_of = {"constant", "cosine", "wsd"},
       .synonyms = {"lr_schedule", "scheduler"}},
      {.name = "warmup",
       .default_value = 0,
       .doc = "steps of linear warm-up",
       .min = 0,
       .max = most_steps,
       .synonyms = {"warmup_steps"}},
      {.name = "decay_steps",
       .default_value = 0,
       .doc = "steps of wsd's decay at the end; 0 = a tenth of the steps",
       .min = 0,
       .max = most_steps},
      {.name = "min_lr_ratio",
       .default_value = 0.0,
       .doc = "where cosine and wsd end, as a part of lr",
       .min = 0,
       .max = 1},
      {.name = "dtype",
       .default_value = "fp32",
       .doc = "of matrix products; states, gates, norms and master weights are fp32 in any case",
       .one_of = {"fp32", "bf16"},
       .synonyms = {"matmul", "precision"}},
      {.name = "recompute",
       .default_value = false,
       .doc = "model scope: keep only each layer's input and compute the rest again in backward",
       .synonyms = {"activation_checkpointing", "gradient_checkpointing"}},
      {.name = "keep_best",
       .default_value = false,
       .doc =
           "layer scope: each layer ends with the parameters of its lowest loss; every step must "
           "see the whole pool"},
      {.name = "token_weight",
       .default_value = "none",
       .doc = "layer scope: weight of a token in the loss; residual = 1/|residual stream|^2",
       .one_of = {"none", "residual"}},
      {.name = "position0_weight",
       .default_value = 0.0,
       .doc = "with it, how much more the first position weighs in the first layers",
       .min = 0},
      {.name = "position0_layers",
       .default_value = 12,
       .doc = "how many first layers these are",
       .min = 0,
       .max = 1e6},
  };
}

Schema stage_row() {
  Schema row;
  for (auto keys : {stage_start_keys(), stage_length_keys(), stage_training_keys()})
    row.keys.insert(row.keys.end(), keys.begin(), keys.end());
  row.tables = {{.name = "mixer.options", .doc = "the mixer's options", .type = {}},
                {.name = "init.options", .doc = "the initializer's options", .type = {}}};
  row.rows = {
      {.name = "objective", .doc = "a part of the loss", .row = objective_row()},
      {.name = "group", .doc = "parameters with a learning rate of their own", .row = group_row()}};
  return row;
}

Schema make_schema() {
  Schema schema;
  for (auto keys : {shared_keys(), run_keys()})
    schema.keys.insert(schema.keys.end(), keys.begin(), keys.end());
  schema.tables = {
      {.name = "scales", .doc = "sets of values by name, chosen by scale", .type = {}}};
  schema.rows = {
      {.name = "corpus", .doc = "text with a weight, in place of text", .row = corpus_row()},
      {.name = "stage", .doc = "what is done, one after the other", .row = stage_row()}};
  return schema;
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  for (std::istringstream rest(text); std::getline(rest, part, ',');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

}  // namespace

const Schema& train_schema() {
  static const Schema schema = make_schema();
  return schema;
}

void apply_scale(Config& config) {
  const ConfigEntry given = config.at("scale");
  const auto entries = config.table("scales");
  std::map<std::string, std::map<std::string, ConfigEntry>> scales;
  for (const auto& [name, entry] : entries) {
    const std::string scale = name.substr(0, name.find('.'));
    if (scale.size() == name.size()) {
      fail(ErrorKind::usage, entry.origin.where + ": " + quoted("scales." + name) +
                                 " is no table of keys; write [scales.NAME]");
    }
    scales[scale][name.substr(scale.size() + 1)] = entry;
  }
  for (const auto& [name, values] : scales) {
    Config trial = config;
    for (const auto& [key, entry] : values) trial.set_entry(key, entry);
  }
  for (const std::string& wanted : split_at_commas(std::get<std::string>(given.value))) {
    const auto scale = scales.find(wanted);
    if (scale == scales.end()) {
      std::vector<std::string> known;
      for (const auto& [name, values] : scales) known.push_back(name);
      fail(ErrorKind::usage,
           given.origin.where + ": there is no scale " + quoted(wanted) +
               (known.empty() ? "; the recipe has none" : did_you_mean(wanted, known)));
    }
    for (const auto& [key, entry] : scale->second) config.set_entry(key, entry);
  }
  config.clear_table("scales");
  config.set_entry("scale", {std::string(), given.origin, {}});
}

}  // namespace graft
