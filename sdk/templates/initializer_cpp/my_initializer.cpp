// An initializer in C++20 without LibTorch: it fills a mixer of any author from the teacher's
// block.
//
//   1. The projections are copied by role; a key-value head that several query heads share is
//      repeated where the mixer has a head for each.
//   2. Where the mixer knows half-lives, the heads get different ones, from short to long.
//   3. With calibration text, the block's output gets the size of the teacher's: the mixer is run
//   on
//      the teacher's inputs, and what it gives is compared.
//
// It knows no mixer by name: roles and natural quantities are all that the two have in common.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "graft/plugin.hpp"

namespace {

namespace sdk = graft::sdk;

constexpr const char* kProjections[] = {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE,
                                        GRAFT_ROLE_OUTPUT};
// A role that is not graft's: used where a mixer has it.
constexpr const char* kHeadScale = "org.example.role.head-scale";

class MyInitializer final : public sdk::Initializer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.my-initializer";
    d.alias = "my_initializer";
    d.name = "My initializer";
    d.version = "0.1.0";
    d.license = "Apache-2.0";
    d.description = "the teacher's projections, half-lives from short to long, outputs of its size";
    d.options.push_back(
        sdk::Option::real("shortest", 4, "half-life of the first head in tokens").range(0.01, 1e6));
    d.options.push_back(
        sdk::Option::real("longest", 512, "half-life of the last head in tokens").range(0.01, 1e6));
    d.options.push_back(sdk::Option::boolean("match_size", true,
                                             "scale the output to the size of the teacher's, where "
                                             "there is calibration text"));
    return d;
  }

  explicit MyInitializer(const sdk::Config& config)
      : shortest_(config.get<double>("shortest")),
        longest_(config.get<double>("longest")),
        match_size_(config.get<bool>("match_size")) {}

  // Checked by the host before it reads a weight.
  void needs(sdk::RoleNeeds& needs) override {
    for (const char* const role : kProjections) {
      needs.teacher(role);
      needs.student(role);
    }
    needs.student(kHeadScale, /*required=*/false);
  }

  // The host computes these signals and no others.
  void calibration(sdk::CalibrationNeeds& needs) override {
    if (!match_size_) return;
    needs.add(GRAFT_SIGNAL_BLOCK_INPUT, /*required=*/false);  // what probe() runs the mixer on
    needs.add(GRAFT_SIGNAL_BLOCK_OUTPUT, /*required=*/false);
  }

  void run(const graft_exec&, sdk::InitArgs& args) override {
    for (const char* const role : kProjections) copy(args.teacher(role), args.student(role));
    set_half_lives(args);
    if (match_size_) match_size(args);
  }

 private:
  // [copy]
  // Copies heads of rows; a smaller number of teacher's heads is repeated in place.
  static void copy(const sdk::NamedTensor& from, const sdk::StudentParam& to) {
    const bool repeat = from.heads() > 0 && to.heads() > from.heads() &&
                        to.heads() % from.heads() == 0 && from.head_dim() == to.head_dim() &&
                        from.role() != GRAFT_ROLE_OUTPUT;
    const std::size_t group = repeat ? static_cast<std::size_t>(to.heads() / from.heads()) : 1;
    const auto source = from.values();
    const auto target = sdk::data<const float>(to.tensor(), to.name());
    if (from.shape().back() != to.shape().back() || source.size() * group != target.size()) {
      throw sdk::Status(
          GRAFT_FAILED_PRECONDITION, sdk::cat("role:", from.role()),
          sdk::cat("the teacher's ", from.name(), " is ", sdk::shape_string(from.shape()),
                   ", the mixer's ", to.name(), " ", sdk::shape_string(to.shape()),
                   ": copying changes no sizes; give the mixer the teacher's"));
    }
    const auto out = to.write();
    const std::size_t head = repeat ? target.size() / static_cast<std::size_t>(to.heads()) : 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = repeat ? source[i / head / group * head + i % head] : source[i];
    }
  }
  // [/copy]

  void set_half_lives(sdk::InitArgs& args) const {
    const int32_t heads = args.student(GRAFT_ROLE_QUERY).heads();
    std::vector<double> half_lives;
    for (int32_t h = 0; h < heads; ++h) {
      const double part = heads == 1 ? 0 : static_cast<double>(h) / (heads - 1);
      half_lives.push_back(shortest_ * std::pow(longest_ / shortest_, part));
    }
    if (!args.set_natural(GRAFT_NATURAL_HALF_LIFE, half_lives)) {
      sdk::log(GRAFT_LOG_INFO,
               sdk::cat("layer ", args.layer().layer, ": the mixer has no half-lives to set"));
    }
  }

  // The sum of squares over the tokens of every batch.
  struct Energy {
    double student = 0, teacher = 0;
  };

  static Energy measure(sdk::InitArgs& args) {
    Energy energy;
    const auto squares = [](std::span<const float> values) {
      double sum = 0;
      for (const float value : values) sum += static_cast<double>(value) * value;
      return sum;
    };
    args.for_each_batch([&](const sdk::Batch& batch) {
      const sdk::NamedTensor* const output = batch.find(GRAFT_SIGNAL_BLOCK_OUTPUT);
      if (output == nullptr || batch.find(GRAFT_SIGNAL_BLOCK_INPUT) == nullptr) return;
      energy.teacher += squares(output->values());
      energy.student += squares(sdk::data<const float>(args.probe("y"), "y"));
    });
    return energy;
  }

  // [match]
  static void match_size(sdk::InitArgs& args) {
    const Energy energy = measure(args);
    if (energy.student == 0 || energy.teacher == 0) return;
    const double factor = std::sqrt(energy.teacher / energy.student);
    // The mixer's own factor where it has one, else the projection that comes last.
    const sdk::StudentParam* const scale = args.find_student(kHeadScale);
    const sdk::StudentParam& param = scale ? *scale : args.student(GRAFT_ROLE_OUTPUT);
    for (float& value : param.write()) value = static_cast<float>(factor * value);
  }
  // [/match]

  double shortest_, longest_;
  bool match_size_;
};

}  // namespace

GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{.id = "org.example.my-initializer",
                                      .version = "0.1.0",
                                      .license = "Apache-2.0"}),
                    sdk::initializer<MyInitializer>())
