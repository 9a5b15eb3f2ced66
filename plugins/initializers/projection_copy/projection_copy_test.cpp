#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plugins/testing/fake_init_host.h"

namespace graft::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

constexpr int64_t kModel = 3;

// A different number in each place: 1000 * tensor + index.
FakeTensor numbered(std::string name, std::string role, std::vector<int64_t> shape, float tensor,
                    int32_t heads = 0, int32_t head_dim = 0, std::string domain = {}) {
  return FakeTensor::filled(
      std::move(name), std::move(role), std::move(shape),
      [=](std::size_t i) { return 1000 * tensor + static_cast<float>(i); }, heads, head_dim,
      std::move(domain));
}

FakeTensor constant(std::string name, std::string role, std::vector<int64_t> shape,
                    int32_t heads = 0, int32_t head_dim = 0, std::string domain = {}) {
  return FakeTensor::filled(
      std::move(name), std::move(role), std::move(shape), [](std::size_t) { return 0.5F; }, heads,
      head_dim, std::move(domain));
}

// A teacher of 4 query heads and `kv` key/value heads of 2, and a mixer of 4 heads.
FakeInitHost host_with(int32_t kv) {
  FakeInitHost host;
  host.teacher = {numbered("q_proj.weight", GRAFT_ROLE_QUERY, {8, kModel}, 1, 4, 2),
                  numbered("k_proj.weight", GRAFT_ROLE_KEY, {kv * 2, kModel}, 2, kv, 2),
                  numbered("v_proj.weight", GRAFT_ROLE_VALUE, {kv * 2, kModel}, 3, kv, 2),
                  numbered("o_proj.weight", GRAFT_ROLE_OUTPUT, {kModel, 8}, 4, 4, 2)};
  host.student = {constant("q.weight", GRAFT_ROLE_QUERY, {8, kModel}, 4, 2),
                  constant("k.weight", GRAFT_ROLE_KEY, {8, kModel}, 4, 2),
                  constant("v.weight", GRAFT_ROLE_VALUE, {8, kModel}, 4, 2),
                  constant("o.weight", GRAFT_ROLE_OUTPUT, {kModel, 8}, 4, 2),
                  constant("g.weight", GRAFT_ROLE_OUTPUT_GATE, {8, kModel}, 4, 2, "silu-inv"),
                  constant("a.weight", GRAFT_ROLE_DECAY_GATE, {4, kModel}, 4, 1)};
  return host;
}

TEST(ProjectionCopy, CopiesTheFourProjectionsAndMarksOnlyThem) {
  FakeInitHost host = host_with(4);
  const Outcome outcome = host.run(*initializer());
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  for (const char* role : {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE, GRAFT_ROLE_OUTPUT}) {
    EXPECT_EQ(find(host.student, role).values, find(host.teacher, role).values) << role;
  }
  EXPECT_THAT(host.written_names(), ElementsAre("q.weight", "k.weight", "v.weight", "o.weight"));
  EXPECT_THAT(find(host.student, GRAFT_ROLE_OUTPUT_GATE).values, ::testing::Each(0.5F));
  EXPECT_EQ(host.batches_read, 0U);
  EXPECT_THAT(plugin().take_log(), IsEmpty());
}

TEST(ProjectionCopy, RepeatsGroupedHeadsInPlace) {
  for (const int32_t kv : {1, 2, 4}) {
    FakeInitHost host = host_with(kv);
    ASSERT_TRUE(host.run(*initializer()).ok());
    for (const char* role : {GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE}) {
      const auto& from = find(host.teacher, role).values;
      const auto& to = find(host.student, role).values;
      for (int h = 0; h < 4; ++h) {
        for (int i = 0; i < 2 * kModel; ++i) {
          const int teacher_head = h / (4 / kv);
          EXPECT_EQ(to[static_cast<std::size_t>(h * 2 * kModel + i)],
                    from[static_cast<std::size_t>(teacher_head * 2 * kModel + i)])
              << role << " kv " << kv << " head " << h;
        }
      }
    }
  }
}

TEST(ProjectionCopy, KeepsGroupedHeadsWhereTheMixerHasThem) {
  FakeInitHost host = host_with(2);
  find(host.student, GRAFT_ROLE_KEY) = constant("k.weight", GRAFT_ROLE_KEY, {4, kModel}, 2, 2);
  ASSERT_TRUE(host.run(*initializer()).ok());
  EXPECT_EQ(find(host.student, GRAFT_ROLE_KEY).values, find(host.teacher, GRAFT_ROLE_KEY).values);
}

TEST(ProjectionCopy, CarriesBiasesAndNormsAndNamesWhatIsDropped) {
  FakeInitHost host = host_with(2);
  host.teacher.push_back(numbered("k_proj.bias", GRAFT_ROLE_KEY_BIAS, {4}, 5, 2, 2));
  host.teacher.push_back(numbered("q_norm.weight", GRAFT_ROLE_QUERY_NORM, {2}, 6));
  host.teacher.push_back(numbered("q_proj.bias", GRAFT_ROLE_QUERY_BIAS, {8}, 7, 4, 2));
  host.teacher.push_back(numbered("o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, {kModel}, 8));
  host.student.push_back(constant("k.bias", GRAFT_ROLE_KEY_BIAS, {8}, 4, 2));
  host.student.push_back(constant("q_norm", GRAFT_ROLE_QUERY_NORM, {8}, 4, 2));
  host.student.push_back(constant("o.bias", GRAFT_ROLE_OUTPUT_BIAS, {kModel}));
  ASSERT_TRUE(host.run(*initializer()).ok());
  EXPECT_THAT(find(host.student, GRAFT_ROLE_KEY_BIAS).values,
              ElementsAre(5000, 5001, 5000, 5001, 5002, 5003, 5002, 5003));
  EXPECT_THAT(find(host.student, GRAFT_ROLE_QUERY_NORM).values,
              ElementsAre(6000, 6001, 6000, 6001, 6000, 6001, 6000, 6001));
  EXPECT_THAT(find(host.student, GRAFT_ROLE_OUTPUT_BIAS).values, ElementsAre(8000, 8001, 8002));
  EXPECT_THAT(plugin().take_log(),
              ElementsAre(Field(&LogLine::text,
                                "layer 0: the teacher's q_proj.bias (graft.role.query-bias) has no "
                                "place in the mixer: dropped")));
}

TEST(ProjectionCopy, ABiasOnlyTheMixerHasBecomesZero) {
  FakeInitHost host = host_with(4);
  host.student.push_back(constant("v.bias", GRAFT_ROLE_VALUE_BIAS, {8}, 4, 2));
  ASSERT_TRUE(host.run(*initializer()).ok());
  EXPECT_THAT(find(host.student, GRAFT_ROLE_VALUE_BIAS).values, ::testing::Each(0.0F));
  EXPECT_THAT(host.written_names(), Contains("v.bias"));
}

TEST(ProjectionCopy, ZeroGateClearsWeightAndBias) {
  FakeInitHost host = host_with(4);
  host.student.push_back(constant("g.bias", GRAFT_ROLE_OUTPUT_GATE_BIAS, {8}, 4, 2, "silu-inv"));
  ASSERT_TRUE(host.run(*initializer({{"gates", sdk::Value::of(std::string("zero"))}})).ok());
  EXPECT_THAT(find(host.student, GRAFT_ROLE_OUTPUT_GATE).values, ::testing::Each(0.0F));
  EXPECT_THAT(find(host.student, GRAFT_ROLE_OUTPUT_GATE_BIAS).values, ::testing::Each(0.0F));
  EXPECT_THAT(find(host.student, GRAFT_ROLE_DECAY_GATE).values, ::testing::Each(0.5F));
  EXPECT_THAT(plugin().take_log(), IsEmpty());
}

TEST(ProjectionCopy, ZeroGateSaysWhenZeroWeightsAreNotAZeroGate) {
  FakeInitHost host = host_with(4);
  find(host.student, GRAFT_ROLE_OUTPUT_GATE).domain = "logit";
  ASSERT_TRUE(host.run(*initializer({{"gates", sdk::Value::of(std::string("zero"))}})).ok());
  EXPECT_THAT(plugin().take_log(),
              ElementsAre(Field(&LogLine::text, HasSubstr("g.weight (logit) is not 0"))));
}

TEST(ProjectionCopy, SmallGateScalesTheRandomWeight) {
  FakeInitHost host = host_with(4);
  ASSERT_TRUE(host.run(*initializer({{"gates", sdk::Value::of(std::string("small"))}})).ok());
  EXPECT_THAT(find(host.student, GRAFT_ROLE_OUTPUT_GATE).values,
              ::testing::Each(::testing::FloatEq(0.01F)));
  EXPECT_THAT(host.written_names(), Contains("g.weight"));
}

TEST(ProjectionCopy, TheOutputGateIsNeededOnlyToChangeIt) {
  const auto needs = [](const char* gates) {
    std::vector<std::string> roles;
    const auto made = initializer({{"gates", sdk::Value::of(std::string(gates))}});
    for (uint32_t i = 0; i < made->v->n_needs; ++i) {
      const graft_role_need& need = made->v->needs[i];
      EXPECT_NE(need.flags & GRAFT_NEED_REQUIRED, 0U);
      roles.push_back(((need.flags & GRAFT_NEED_TEACHER) != 0 ? "teacher " : "student ") +
                      std::string(need.role));
    }
    return roles;
  };
  EXPECT_EQ(needs("random").size(), 8U);
  EXPECT_THAT(needs("random"), Contains("teacher graft.role.value"));
  EXPECT_THAT(needs("zero"), Contains("student graft.role.output-gate"));
  EXPECT_THAT(needs("small"), Contains("student graft.role.output-gate"));
  EXPECT_EQ(initializer()->v->n_calibration, 0U);
}

TEST(ProjectionCopy, AMissingRoleIsNamedWithThoseThereAre) {
  FakeInitHost host = host_with(4);
  host.student.erase(host.student.begin() + 1);
  const Outcome outcome = host.run(*initializer());
  EXPECT_EQ(outcome.status, GRAFT_NOT_FOUND);
  EXPECT_EQ(outcome.where, "role:graft.role.key");
  EXPECT_THAT(outcome.message, HasSubstr("student has no parameter of this role; it has: "
                                         "graft.role.query, graft.role.value"));
  EXPECT_THAT(host.written_names(), IsEmpty());
}

struct Misfit {
  const char* role;
  std::vector<int64_t> shape;
  int32_t heads, head_dim;
  const char* message;
};

TEST(ProjectionCopy, SizesThatDoNotFitAreRefusedWithBothValues) {
  const Misfit misfits[] = {
      {GRAFT_ROLE_VALUE,
       {16, kModel},
       4,
       4,
       "expected head_dim 2 as in the teacher's v_proj.weight, got 4 in the mixer's x"},
      {GRAFT_ROLE_KEY,
       {6, kModel},
       3,
       2,
       "expected heads 2 as in the teacher's k_proj.weight, got 3 in the mixer's x"},
      {GRAFT_ROLE_QUERY,
       {16, kModel},
       8,
       2,
       "expected heads 4 as in the teacher's q_proj.weight, got 8 in the mixer's x"},
      {GRAFT_ROLE_OUTPUT,
       {kModel, 16},
       4,
       4,
       "expected head_dim 2 as in the teacher's o_proj.weight, got 4 in the mixer's x"},
      {GRAFT_ROLE_OUTPUT,
       {kModel + 1, 8},
       4,
       2,
       "expected shape [3, 8] as in the teacher's o_proj.weight, got [4, 8] in the mixer's x"},
      {GRAFT_ROLE_VALUE,
       {8, kModel + 1},
       4,
       2,
       "expected shape [8, 3] as in the teacher's v_proj.weight, got [8, 4] in the mixer's x"},
  };
  for (const Misfit& misfit : misfits) {
    FakeInitHost host = host_with(2);
    find(host.student, misfit.role) =
        constant("x", misfit.role, misfit.shape, misfit.heads, misfit.head_dim);
    const Outcome outcome = host.run(*initializer());
    EXPECT_EQ(outcome.status, GRAFT_FAILED_PRECONDITION) << misfit.message;
    EXPECT_EQ(outcome.where, std::string("role:") + misfit.role);
    EXPECT_THAT(outcome.message, HasSubstr(misfit.message));
    EXPECT_THAT(outcome.message, HasSubstr("give the mixer the teacher's"));
  }
}

TEST(ProjectionCopy, IsTheSameEachTime) {
  const auto once = [] {
    FakeInitHost host = host_with(2);
    EXPECT_TRUE(host.run(*initializer()).ok());
    std::vector<std::vector<float>> values;
    for (const auto& t : host.student) values.push_back(t.values);
    return values;
  };
  EXPECT_EQ(once(), once());
}

}  // namespace
}  // namespace graft::testing
