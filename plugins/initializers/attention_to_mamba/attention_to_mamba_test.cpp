#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "plugins/testing/fake_init_host.h"

namespace graft::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Options = std::map<std::string, sdk::Value>;

PluginUnderTest& plugin() {
  static PluginUnderTest library(PLUGIN_FILE);
  return library;
}

std::shared_ptr<graft_initializer> initializer(const Options& options = {}) {
  std::shared_ptr<graft_initializer> made;
  const Outcome outcome =
      plugin().create<graft_initializer_factory>(GRAFT_EXT_INITIALIZER_FACTORY, options, &made);
  EXPECT_TRUE(outcome.ok()) << outcome.message;
  return made;
}

// A mixer that only answers to graft.mixer-domain/1, and notes what it was told.
class DomainMixer {
 public:
  std::vector<std::string> calls;
  std::string lacks;  // the quantity it has not

  DomainMixer() {
    table_.struct_size = sizeof table_;
    table_.get_extension = [](graft_mixer*, const char* id) -> const void* {
      static constexpr graft_mixer_domain domain{sizeof(graft_mixer_domain), 0, &set};
      return id != nullptr && std::string_view(id) == GRAFT_EXT_MIXER_DOMAIN ? &domain : nullptr;
    };
    mixer_ = {&table_, this};
  }
  DomainMixer(const DomainMixer&) = delete;
  graft_mixer* c() { return &mixer_; }

 private:
  static graft_status set(graft_mixer* mixer, const char* what, uint32_t n, const double* values,
                          DLTensor* const*, uint8_t*, graft_error*) {
    auto& self = *static_cast<DomainMixer*>(mixer->self);
    if (self.lacks == what) return GRAFT_UNIMPLEMENTED;
    for (uint32_t i = 1; i < n; ++i) EXPECT_EQ(values[i], values[0]);
    self.calls.push_back(sdk::cat(what, " ", n, " x ", values[0]));
    return GRAFT_OK;
  }
  graft_mixer_vtbl table_{};
  graft_mixer mixer_{};
};

constexpr int64_t kModel = 3;

FakeTensor numbered(std::string name, std::string role, std::vector<int64_t> shape, float tensor,
                    int32_t heads = 0, int32_t head_dim = 0) {
  return FakeTensor::filled(
      std::move(name), std::move(role), std::move(shape),
      [=](std::size_t i) { return 1000 * tensor + static_cast<float>(i); }, heads, head_dim);
}
FakeTensor constant(std::string name, std::string role, std::vector<int64_t> shape,
                    int32_t heads = 0, int32_t head_dim = 0, std::string domain = {}) {
  return FakeTensor::filled(
      std::move(name), std::move(role), std::move(shape), [](std::size_t) { return 0.5F; }, heads,
      head_dim, std::move(domain));
}

// 4 query heads of 2, 2 key-value heads; feature maps of 3 rows.
struct Conversion {
  FakeInitHost host;
  DomainMixer mixer;

  explicit Conversion(bool from_hedgehog) {
    host.mixer = mixer.c();
    host.teacher = {numbered("q_proj.weight", GRAFT_ROLE_QUERY, {8, kModel}, 1, 4, 2),
                    numbered("k_proj.weight", GRAFT_ROLE_KEY, {4, kModel}, 2, 2, 2),
                    numbered("v_proj.weight", GRAFT_ROLE_VALUE, {4, kModel}, 3, 2, 2),
                    numbered("o_proj.weight", GRAFT_ROLE_OUTPUT, {kModel, 8}, 4, 4, 2)};
    if (from_hedgehog) {
      host.teacher.push_back(numbered("fq", GRAFT_ROLE_FEATURE_MAP_Q, {4, 3, 2}, 5, 4, 3));
      host.teacher.push_back(numbered("fk", GRAFT_ROLE_FEATURE_MAP_K, {4, 3, 2}, 6, 4, 3));
      host.teacher.push_back(numbered("fqb", GRAFT_ROLE_FEATURE_MAP_Q "-bias", {4, 3}, 7, 4, 3));
    }
    host.student = {constant("q.w", GRAFT_ROLE_QUERY, {8, kModel}, 4, 2),
                    constant("k.w", GRAFT_ROLE_KEY, {4, kModel}, 2, 2),
                    constant("v.w", GRAFT_ROLE_VALUE, {4, kModel}, 2, 2),
                    constant("o.w", GRAFT_ROLE_OUTPUT, {kModel, 8}, 4, 2),
                    constant("map_q", GRAFT_ROLE_FEATURE_MAP_Q, {4, 3, 2}, 4, 3),
                    constant("map_k", GRAFT_ROLE_FEATURE_MAP_K, {4, 3, 2}, 4, 3),
                    constant("map_q.b", GRAFT_ROLE_FEATURE_MAP_Q "-bias", {4, 3}, 4, 3),
                    constant("conv", GRAFT_ROLE_SHORT_CONV_K, {2, 1, 4}),
                    constant("conv.b", GRAFT_ROLE_SHORT_CONV_K "-bias", {2}),
                    constant("conv residual", GRAFT_ROLE_SHORT_CONV, {2, 1, 4}, 0, 0, "residual"),
                    constant("dt", GRAFT_ROLE_DECAY_GATE_BIAS, {4}, 4, 1, "softplus-inv"),
                    constant("gate", GRAFT_ROLE_OUTPUT_GATE, {8, kModel}, 4, 2, "silu-inv")};
  }
  FakeTensor& student(const std::string& name) {
    return *std::ranges::find(host.student, name, &FakeTensor::name);
  }
  void drop_teacher(const std::string& role) {
    std::erase_if(host.teacher, [&](const FakeTensor& t) { return t.role == role; });
  }
};

TEST(AttentionToMamba, AsksForTheProjectionsAndTheFeatureMapsOfTheTarget) {
  const auto made = initializer();
  int required = 0;
  for (uint32_t i = 0; i < made->v->n_needs; ++i) {
    const graft_role_need& need = made->v->needs[i];
    const bool map = std::string(need.role).find("feature-map") != std::string::npos;
    const bool needed = (need.flags & GRAFT_NEED_REQUIRED) != 0;
    EXPECT_EQ(needed, !(map && (need.flags & GRAFT_NEED_TEACHER) != 0)) << need.role;
    required += needed;
  }
  EXPECT_EQ(required, 10);
  EXPECT_EQ(made->v->n_calibration, 0U);
}

TEST(AttentionToMamba, TakesEveryParameterOfAHedgehog) {
  Conversion s(true);
  const Outcome outcome = s.host.run(*initializer());
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  for (const FakeTensor& from : s.host.teacher)
    EXPECT_EQ(find(s.host.student, from.role).values, from.values) << from.role;
}

TEST(AttentionToMamba, NeutralisesWhatIsMoreThanLinearAttention) {
  for (const bool from_hedgehog : {true, false}) {
    Conversion s(from_hedgehog);
    ASSERT_TRUE(s.host.run(*initializer()).ok());
    EXPECT_THAT(s.student("conv").values, ElementsAre(0, 0, 0, 1, 0, 0, 0, 1));
    EXPECT_THAT(s.student("conv residual").values, Each(0.0F));
    EXPECT_THAT(s.student("conv.b").values, Each(0.0F));
    EXPECT_THAT(s.mixer.calls,
                ElementsAre("write-gate 4 x 1", "half-life 4 x inf", "output-gate 4 x 1"));
  }
}

TEST(AttentionToMamba, LeavesADecayThatCanLearnWhereAskedTo) {
  Conversion s(true);
  ASSERT_TRUE(s.host.run(*initializer({{"half_life", sdk::Value::of(2048.0)}})).ok());
  EXPECT_EQ(s.mixer.calls[1], "half-life 4 x 2048");
}

TEST(AttentionToMamba, FromAttentionTheFeatureMapsAreIdentities) {
  Conversion s(false);
  ASSERT_TRUE(s.host.run(*initializer()).ok());
  for (const char* map : {"map_q", "map_k"}) {
    for (std::size_t i = 0; i < 24; ++i) {
      const std::size_t row = i / 2 % 3, column = i % 2;
      EXPECT_EQ(s.student(map).values[i], row == column ? 1.0F : 0.0F) << map << " " << i;
    }
  }
  EXPECT_THAT(s.student("map_q.b").values, Each(0.0F));
  EXPECT_EQ(s.student("k.w").values, s.host.teacher[1].values);
}

TEST(AttentionToMamba, MixersWithoutConvDecayOrGateNeedNoNeutralValue) {
  Conversion s(true);
  for (const char* role :
       {GRAFT_ROLE_SHORT_CONV, GRAFT_ROLE_SHORT_CONV_K, GRAFT_ROLE_SHORT_CONV_K "-bias",
        GRAFT_ROLE_DECAY_GATE_BIAS, GRAFT_ROLE_OUTPUT_GATE})
    std::erase_if(s.host.student, [&](const FakeTensor& t) { return t.role == role; });
  s.host.mixer = nullptr;
  const Outcome outcome = s.host.run(*initializer());
  EXPECT_TRUE(outcome.ok()) << outcome.message;
}

// ---------------------------------------------------------------- refusals

Outcome refused(Conversion& s) {
  const Outcome outcome = s.host.run(*initializer());
  EXPECT_EQ(outcome.status, GRAFT_FAILED_PRECONDITION) << outcome.message;
  return outcome;
}

TEST(AttentionToMamba, RefusesWhatWouldNotEqualItsSource) {
  Conversion no_place(true);
  no_place.host.teacher.push_back(numbered("q_norm.weight", GRAFT_ROLE_QUERY_NORM, {2}, 8));
  Outcome outcome = refused(no_place);
  EXPECT_EQ(outcome.where, "role:" GRAFT_ROLE_QUERY_NORM);
  EXPECT_THAT(outcome.message, HasSubstr("the source's q_norm.weight has no place"));

  Conversion other_shape(true);
  other_shape.student("map_k") = constant("map_k", GRAFT_ROLE_FEATURE_MAP_K, {4, 2, 2}, 4, 2);
  EXPECT_THAT(refused(other_shape).message,
              AllOf(HasSubstr("expected shape [4, 3, 2]"), HasSubstr("source's fk"),
                    HasSubstr("got [4, 2, 2]"), HasSubstr("mixer's map_k")));

  for (const bool from_hedgehog : {true, false}) {
    Conversion extra_norm(from_hedgehog);
    extra_norm.host.student.push_back(constant("kn", GRAFT_ROLE_KEY_NORM, {2}));
    EXPECT_THAT(refused(extra_norm).message, HasSubstr("set the option qk_norm"));
  }
}

TEST(AttentionToMamba, ABiasOfZerosMayBeDroppedAndOneTooManyBecomesZero) {
  Conversion s(true);
  s.host.teacher.push_back(FakeTensor::filled(
      "v_proj.bias", GRAFT_ROLE_VALUE_BIAS, {4}, [](auto) { return 0.0F; }, 2, 2));
  s.host.student.push_back(constant("kb", GRAFT_ROLE_KEY_BIAS, {4}, 2, 2));
  const Outcome outcome = s.host.run(*initializer());
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  EXPECT_THAT(s.student("kb").values, Each(0.0F));

  s.host.teacher.back().values[2] = 1e-3F;
  EXPECT_EQ(refused(s).where, "role:" GRAFT_ROLE_VALUE_BIAS);
}

TEST(AttentionToMamba, RefusesASourceWithHalfOfTheFeatureMaps) {
  Conversion s(true);
  s.drop_teacher(GRAFT_ROLE_FEATURE_MAP_K);
  EXPECT_EQ(refused(s).where, "role:" GRAFT_ROLE_FEATURE_MAP_K);
}

TEST(AttentionToMamba, RefusesAMixerWhoseGateOrDecayCannotBeNeutral) {
  Conversion gate(true);
  gate.mixer.lacks = GRAFT_NATURAL_OUTPUT_GATE;
  EXPECT_THAT(refused(gate).message,
              AllOf(HasSubstr("the mixer's gate cannot be neutralised"), HasSubstr("output-gate")));
  Conversion decay(true);
  decay.mixer.lacks = GRAFT_NATURAL_HALF_LIFE;
  EXPECT_THAT(refused(decay).message, HasSubstr("the mixer's dt cannot be neutralised"));
}

TEST(AttentionToMamba, RefusesAConvItDoesNotUnderstand) {
  Conversion s(true);
  s.student("conv") = constant("conv", GRAFT_ROLE_SHORT_CONV_K, {2, 4});
  EXPECT_THAT(refused(s).message,
              AllOf(HasSubstr("expected a depthwise kernel"), HasSubstr("got shape [2, 4]")));
}

TEST(AttentionToMamba, AMissingProjectionIsNamed) {
  Conversion s(false);
  s.drop_teacher(GRAFT_ROLE_VALUE);
  const Outcome outcome = s.host.run(*initializer());
  EXPECT_EQ(outcome.status, GRAFT_NOT_FOUND);
  EXPECT_EQ(outcome.where, "role:" GRAFT_ROLE_VALUE);
}

}  // namespace
}  // namespace graft::testing
