#include "core/config/keys.h"

#include <cstdint>
#include <string>
#include <vector>

namespace graft {
namespace {

using Strings = std::vector<std::string>;
constexpr double most_tokens = 1e12;  // far above what fits, far below what overflows

std::vector<Key> job_keys() {
  return {
      {.name = "teacher",
       .default_value = "",
       .doc = "the teacher: a folder in Hugging Face format",
       .synonyms = {"model", "teacher_dir"}},
      {.name = "text",
       .default_value = Strings{},
       .doc = "calibration text: .txt and .jsonl files, or folders of them",
       .synonyms = {"data", "corpus", "texts"}},
      {.name = "text_field",
       .default_value = "text",
       .doc = "the field of a .jsonl line that holds its text"},
      {.name = "eval_text",
       .default_value = Strings{},
       .doc = "held-out text for every figure; without it the tail of the calibration text is held "
              "out",
       .synonyms = {"test_text", "validation_text"}},
      {.name = "out",
       .default_value = "",
       .doc = "folder for the student and results.json",
       .synonyms = {"output", "out_dir", "output_dir"}},
      {.name = "force",
       .default_value = false,
       .doc = "replace the out folder when it is not empty",
       .synonyms = {"overwrite"}},
      {.name = "recipe",
       .default_value = "auto",
       .doc =
           "a recipe file; auto = the default one of the mixer and initializer, none = no recipe"},
      {.name = "keep_attention",
       .default_value = Strings{"none"},
       .doc = "layers that keep their attention: none, uniform:K or 0,4,8-11; of several the first "
              "is written, all are "
              "measured",
       .synonyms = {"keep", "attention_layers"}},
      {.name = "compare",
       .default_value = Strings{"none"},
       .doc =
           "baselines to measure beside the asked start: names of [[baseline]] rows, all or none",
       .synonyms = {"baselines"}},
      {.name = "seed", .default_value = 1, .doc = "of every random draw", .min = 0},
      {.name = "threads",
       .default_value = 0,
       .doc = "CPU threads, 0 = all cores",
       .min = 0,
       .max = 4096,
       .synonyms = {"num_threads", "cores"}},
      {.name = "matmul",
       .default_value = "fp32",
       .doc = "precision of matrix products",
       .one_of = {"fp32", "bf16"},
       .synonyms = {"dtype", "precision"}},
      {.name = "plugin_path",
       .default_value = Strings{},
       .doc = "folders to look for plugins in, before GRAFT_PLUGIN_PATH and the installed ones",
       .synonyms = {"plugins", "plugin_dir"}},
      {.name = "mixer.name",
       .default_value = "",
       .doc = "the token mixer that replaces attention",
       .flag = "--mixer"},
      {.name = "init.name",
       .default_value = "",
       .doc = "the initializer that fills the mixer from the teacher",
       .flag = "--init"},
      {.name = "init.tokens",
       .default_value = 16384,
       .doc = "calibration tokens the initializer sees",
       .min = 0,
       .max = most_tokens},
      {.name = "window",
       .default_value = 256,
       .doc = "tokens in one calibration sequence",
       .min = 1,
       .max = 1 << 20,
       .synonyms = {"sequence_length", "seq_len", "block_size"}},
  };
}

std::vector<Key> calibrate_keys() {
  return {
      {.name = "calibrate.enabled",
       .default_value = true,
       .doc = "train each converted layer alone after its start"},
      {.name = "calibrate.tokens",
       .default_value = 24576,
       .doc = "calibration tokens of the stage; the initializer's are the first of them",
       .min = 1,
       .max = most_tokens},
      {.name = "calibrate.steps",
       .default_value = 100,
       .doc = "optimizer steps of each layer",
       .min = 0,
       .max = 1e9,
       .synonyms = {"max_steps", "num_steps", "iterations"}},
      {.name = "calibrate.batch",
       .default_value = 2,
       .doc = "sequences in one step",
       .min = 1,
       .max = 1 << 20,
       .synonyms = {"batch_size"}},
      {.name = "calibrate.full_batch",
       .default_value = false,
       .doc = "every sequence in every step"},
      {.name = "calibrate.lr",
       .default_value = 1e-3,
       .doc = "AdamW's learning rate",
       .min = 0,
       .synonyms = {"learning_rate"}},
      {.name = "calibrate.min_lr_ratio",
       .default_value = 0.05,
       .doc = "where the cosine ends, as a part of lr",
       .min = 0,
       .max = 1},
      {.name = "calibrate.warmup",
       .default_value = 10,
       .doc = "steps of linear warm-up",
       .min = 0,
       .max = 1e9,
       .synonyms = {"warmup_steps"}},
      {.name = "calibrate.schedule",
       .default_value = "cosine",
       .doc = "of the learning rate",
       .one_of = {"constant", "cosine"},
       .synonyms = {"lr_schedule", "scheduler"}},
      {.name = "calibrate.weight_decay",
       .default_value = 0.01,
       .doc = "AdamW's, for parameters that take decay",
       .min = 0,
       .synonyms = {"decay", "wd"}},
      {.name = "calibrate.clip",
       .default_value = 1.0,
       .doc = "largest norm of a layer's gradient, 0 = no limit",
       .min = 0,
       .synonyms = {"grad_clip", "max_grad_norm", "clip_norm"}},
      {.name = "calibrate.betas",
       .default_value = std::vector<double>{0.9, 0.999},
       .doc = "AdamW's two decay rates",
       .min = 0,
       .max = 1},
      {.name = "calibrate.keep_best",
       .default_value = false,
       .doc = "keep the parameters of the lowest loss (with full_batch)"},
      {.name = "calibrate.frozen_roles",
       .default_value = Strings{},
       .doc = "roles that do not train: output, norm, ...",
       .synonyms = {"frozen", "freeze"}},
      {.name = "calibrate.token_weight",
       .default_value = "residual",
       .doc = "weight of a token in the loss; residual = 1/|residual stream|^2",
       .one_of = {"none", "residual"}},
      {.name = "calibrate.position0_weight",
       .default_value = 64.0,
       .doc = "how much more the first position weighs in the first layers",
       .min = 0},
      {.name = "calibrate.position0_layers",
       .default_value = 12,
       .doc = "how many first layers these are",
       .min = 0,
       .max = 1e6},
      {.name = "calibrate.objective.name",
       .default_value = "",
       .doc = "the objective of the stage",
       .flag = "--objective"},
  };
}

std::vector<Key> evaluation_keys() {
  return {
      {.name = "eval.windows",
       .default_value = 16,
       .doc = "windows of held-out text, from its start; 0 = all of it",
       .min = 0,
       .max = 1e9},
      {.name = "eval.context",
       .default_value = 512,
       .doc = "tokens in a window",
       .min = 2,
       .max = 1 << 20,
       .synonyms = {"window", "context_length", "max_length"}},
      {.name = "eval.stride",
       .default_value = 0,
       .doc = "tokens between the starts of two windows, 0 = context",
       .min = 0,
       .max = 1 << 20},
      {.name = "eval.bos",
       .default_value = false,
       .doc = "put the tokenizer's BOS before every window"},
      {.name = "agreement.prompts",
       .default_value = 16,
       .doc = "prompts continued greedily by teacher and student",
       .min = 0,
       .max = 1e6},
      {.name = "agreement.prompt_length",
       .default_value = 48,
       .doc = "tokens in such a prompt",
       .min = 1,
       .max = 1 << 20},
      {.name = "agreement.tokens",
       .default_value = 32,
       .doc = "tokens of each continuation",
       .min = 1,
       .max = 1 << 20},
      {.name = "generate.prompt",
       .default_value = "",
       .doc = "text to go on from",
       .flag = "--prompt"},
      {.name = "generate.tokens",
       .default_value = 64,
       .doc = "most tokens to write",
       .min = 0,
       .max = 1e9,
       .synonyms = {"max_tokens", "max_new_tokens"}},
      {.name = "generate.temperature", .default_value = 0.0, .doc = "0 = greedy", .min = 0},
      {.name = "generate.top_k",
       .default_value = 0,
       .doc = "sample from the k likeliest, 0 = all",
       .min = 0,
       .max = 1e9},
      {.name = "generate.top_p",
       .default_value = 1.0,
       .doc = "sample from the likeliest that hold this much",
       .min = 0,
       .max = 1},
  };
}

Schema baseline_row() {
  return {
      .keys =
          {{.name = "name",
            .default_value = "",
            .doc = "what --compare and the tables call it",
            .required = true},
           {.name = "init.name", .default_value = "", .doc = "its initializer", .required = true},
           {.name = "stage",
            .default_value = "init",
            .doc = "measured after its start, or after calibration too",
            .one_of = {"init", "calibrate"}}},
      .tables = {{.name = "mixer.options", .doc = "its mixer's options", .type = {}},
                 {.name = "init.options", .doc = "its initializer's options", .type = {}}},
      .rows = {},
  };
}

Schema make_schema() {
  Schema schema;
  for (auto keys : {job_keys(), calibrate_keys(), evaluation_keys()}) {
    schema.keys.insert(schema.keys.end(), keys.begin(), keys.end());
  }
  schema.tables = {
      {.name = "mixer.options", .doc = "the mixer's options", .type = {}},
      {.name = "init.options", .doc = "the initializer's options", .type = {}},
      {.name = "calibrate.lr_roles",
       .doc = "learning rates by role, in place of lr",
       .type = ValueType::number},
      {.name = "calibrate.objective.options", .doc = "the objective's options", .type = {}},
  };
  schema.rows = {{.name = "baseline", .doc = "a start to compare with", .row = baseline_row()}};
  return schema;
}

}  // namespace

const Schema& graft_schema() {
  static const Schema schema = make_schema();
  return schema;
}

}  // namespace graft
