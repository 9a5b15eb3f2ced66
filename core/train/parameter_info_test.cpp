#include "core/train/parameter_info.h"

#include "core/base/json.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Strings = std::vector<std::string>;

const std::vector<ParameterInfo>& small() {
  static const std::vector<ParameterInfo> list = {
      {"model.layers.0.mixer.q_proj.weight", "graft.role.query", "mixers", 0, 4, true, true},
      {"model.layers.0.mixer.map_q", "graft.role.feature-map-query", "mixers", 0, 4, true, true},
      {"model.layers.0.mixer.map_k", "graft.role.feature-map-key", "mixers", 0, 4, true, true},
      {"model.layers.0.mixer.table", "", "mixers", 0, 4, /*trainable=*/false, true},
      {"model.layers.1.mixer.q_proj.weight", "graft.role.query", "mixers", 1, 4, true, true},
      {"model.embed_tokens.weight", "", "embeddings", -1, 9, true, true},
      {"model.layers.0.mlp.up_proj.weight", "", "mlp", 0, 4, true, true},
  };
  return list;
}

std::vector<std::size_t> select(const Strings& selectors) {
  return select_parameters(small(), selectors, "r.toml:3:1: train");
}

TEST(SelectParameters, ByModuleRoleAndName) {
  EXPECT_THAT(select({"all"}), ElementsAre(0, 1, 2, 4, 5, 6));
  EXPECT_THAT(select({"mixers"}), ElementsAre(0, 1, 2, 4));
  EXPECT_THAT(select({"all", "-embeddings"}), ElementsAre(0, 1, 2, 4, 6));
  EXPECT_THAT(select({"role:feature-map-query"}), ElementsAre(1));
  EXPECT_THAT(select({"role:feature-map-*"}), ElementsAre(1, 2));
  EXPECT_THAT(select({"role:graft.role.query"}), ElementsAre(0, 4));
  EXPECT_THAT(select({"mixers", "-role:query", "mlp"}), ElementsAre(1, 2, 6));
  EXPECT_THAT(select({"name:model.layers.1.*"}), ElementsAre(4));
  EXPECT_THAT(select({"name:*.weight"}), ElementsAre(0, 4, 5, 6));
  EXPECT_THAT(select({"mixers", "-mixers"}), ElementsAre());
  EXPECT_THAT(select({}), ElementsAre());
}

TEST(SelectParameters, ATypoIsNamedWithTheNearest) {
  EXPECT_GRAFT_ERROR(select({"mixer"}), ErrorKind::usage,
                     AllOf(HasSubstr("r.toml:3:1: train"), HasSubstr("'mixer'"),
                           HasSubstr("did you mean 'mixers'")));
  EXPECT_GRAFT_ERROR(select({"all", "-role:feature-map-qury"}), ErrorKind::usage,
                     HasSubstr("did you mean 'role:feature-map-query'"));
  EXPECT_GRAFT_ERROR(select({"norms"}), ErrorKind::usage, HasSubstr("known: all, mixers, mlp"));
  EXPECT_GRAFT_ERROR(select({"name:*.nothing"}), ErrorKind::usage, HasSubstr("name:*.nothing"));
}

TEST(DescribeSelection, CountsLayers) {
  EXPECT_EQ(describe_selection(small(), select({"all"})),
            "embeddings: model.embed_tokens.weight; mixers: q_proj.weight x2, map_q, map_k; mlp: "
            "mlp.up_proj.weight");
}

TEST(BackboneParameters, HaveTheirModules) {
  const auto folder = std::filesystem::path(GRAFT_TEST_DATA) / "models";
  for (const char* model : {"llama", "gpt_neox"}) {
    if (!std::filesystem::exists(folder / model)) continue;
    const ModelConfig config =
        parse_model_config(read_json(folder / model / "config.json"), "config.json");
    std::map<std::string, int> count;
    for (const ParameterInfo& parameter : backbone_parameters(config, {0})) {
      ++count[parameter.module];
      EXPECT_EQ(parameter.decays, parameter.module != "norms" && !parameter.name.ends_with("bias"))
          << parameter.name;
      EXPECT_FALSE(parameter.module == "attention" && parameter.layer == 0) << parameter.name;
    }
    EXPECT_EQ(count["embeddings"], 1) << model;
    EXPECT_EQ(count["head"], config.tied ? 0 : 1) << model;
    EXPECT_GT(count["attention"], 0) << model;
    EXPECT_GT(count["mlp"], 0) << model;
    EXPECT_GT(count["norms"], 0) << model;
    EXPECT_EQ(count.size(), 5u) << model;
  }
}

}  // namespace
}  // namespace graft
