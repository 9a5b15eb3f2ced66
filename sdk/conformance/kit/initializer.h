// An initializer under test, and a host that runs it: a teacher, a mixer to be filled, calibration
// text. Every run checks what holds of any run: no byte around a tensor was written, neither the
// teacher nor a signal changed, and what is not marked as written is as it was.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kit/neighbours.h"
#include "kit/teacher.h"

namespace graft::conformance {

class Initializer {
 public:
  // Fails where create does.
  Initializer(const Library& library, const Component& component, const Options& options);
  ~Initializer();
  Initializer(const Initializer&) = delete;
  Initializer& operator=(const Initializer&) = delete;

  graft_initializer* get() const { return handle_; }
  // Both fail where the table announces entries and gives none.
  std::span<const graft_role_need> needs() const;
  std::span<const graft_calibration_need> calibration() const;
  // NULL: it does not ask for this signal.
  const graft_calibration_need* find_signal(std::string_view name) const;

 private:
  graft_initializer* handle_ = nullptr;
};

// What one run looks like.
struct InitSetup {
  const Layer* layer = &small_layer();
  std::uint64_t seed = 1;
  // Sequences and tokens of each calibration batch; the last is smaller, as a host's may be.
  std::vector<std::pair<std::int64_t, std::int64_t>> batches{{3, 24}, {2, 24}};
  const Choice* source = nullptr;    // a mixer in the place of attention, as after a stage before
  const Teacher* teacher = nullptr;  // in the place of a random one
  std::string missing_role;          // of the teacher, not passed
  bool optional_signals = true;      // false: only the required ones are offered
  bool random_start = false;         // the mixer's parameters away from their defaults
  std::optional<int> next_batch_fails;  // from its call of this number on
  bool probe_fails = false;
  bool poison_ended = false;  // what a batch or a probe gave is filled with NaN when it ends
};

struct InitResult {
  Outcome outcome;
  std::vector<Tensor> start, student;  // the mixer's parameters before and after
  std::vector<bool> written;
  int passes = 0, batches = 0, probes = 0;  // a pass: a first batch that was read
};

// The mixer with its parameters, for one layer.
class InitRig {
 public:
  // Skips where the mixer refuses the layer or computes no float32.
  InitRig(const Context& context, const Choice& mixer, const InitSetup& setup);
  ~InitRig();

  InitResult run(Initializer& initializer);
  Mixer& mixer() { return *mixer_; }
  // y for random x with these parameters; checks that it is finite.
  Tensor forward(const std::vector<Tensor>& params);

  // What the host says before it loads weights: "the mixer has no role graft.role.x";
  // "" when all required roles are there.
  std::string missing_role(const Initializer& initializer) const;
  // The teacher has every role that the initializer names for it, the optional ones too.
  bool has_all_teacher_roles(const Initializer& initializer) const;

 private:
  class Feed;
  class Parameters;
  Outcome call(Initializer& initializer, Feed& feed, const Parameters& teacher,
               const Parameters& student, Tensor& marks);

  InitSetup setup_;
  Context mixer_context_;
  std::unique_ptr<Mixer> mixer_;
  std::vector<NamedParameter> teacher_;
  std::vector<std::vector<Signal>> text_;  // of each batch
};

// The text a failing next_batch() or probe() of the rig answers with.
inline constexpr char kHostFailure[] = "no such luck: the kit makes this call fail";

// The mixer that the tests of one initializer run on, and the source where the attention block does
// not have a role it requires: the first that fit, the kit's own before others. Skips when none
// does.
struct Bench {
  explicit Bench(const Context& context, const Initializer& initializer);
  InitSetup setup(const Layer& layer = small_layer()) const;

  std::shared_ptr<Neighbours> neighbours;
  const Choice* mixer = nullptr;
  const Choice* source = nullptr;
  std::uint64_t seed;
};

// Do the roles of an attention block of this layer hold all that it requires of the teacher?
bool starts_from_attention(const Initializer& initializer, const Layer& layer);

}  // namespace graft::conformance
