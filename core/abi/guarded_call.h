#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graft/graft.h"

namespace graft {

// Memory with bytes before and behind it that nobody may touch.
class GuardedMemory {
 public:
  // Every byte is 0xFF: NaN in each float format, so that a result nobody wrote is seen.
  GuardedMemory(std::uint64_t bytes, std::uint64_t alignment);

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  std::uint64_t size() const { return bytes_; }
  // "before the start of", "past the end of", or "" when all is as it was.
  std::string overrun() const;

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::uint64_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* data_;
};

// The memory of one call into a plugin in strict mode: the plugin gets guarded copies in the place
// of the host's CPU tensors, whose addresses it thus sees change from call to call. Inputs are
// registered first. NULL and tensors without elements are passed as they are.
class GuardedCall {
 public:
  using NameOf = std::function<std::string(std::uint32_t)>;

  // `who` as in blame_plugin().
  explicit GuardedCall(std::string who) : who_(std::move(who)) {}

  // Not to be changed.
  DLTensor* input(const DLTensor* given, const std::string& name);
  // To be written as a whole.
  DLTensor* output(const DLTensor* given, const std::string& name);
  // Has contents that may be changed. May be an input that is there already: a state in place.
  DLTensor* inout(const DLTensor* given, const std::string& name);
  void* workspace(const graft_exec& exec);

  // Arrays of them; NULL stays NULL. They live as long as this object.
  const DLTensor* const* inputs(const DLTensor* const* given, std::uint32_t n, const NameOf& name);
  DLTensor* const* outputs(DLTensor* const* given, std::uint32_t n, const NameOf& name);
  DLTensor* const* inouts(DLTensor* const* given, std::uint32_t n, const NameOf& name);

  // Gives what the plugin wrote so far to the host's own tensors.
  void publish();
  // After a call that succeeded: blames the plugin for what it wrote where it must not and for what
  // it left unwritten; publishes the rest.
  void finish();
  // Has the plugin changed what this inout held when it was registered?
  bool is_changed(const DLTensor* given) const;

 private:
  enum class Use { input, output, inout };
  struct Block {
    std::string name;
    Use use;
    DLTensor given, copy;
    GuardedMemory memory;
    std::vector<std::byte> before;  // of an inout
  };

  DLTensor* add(const DLTensor* given, const std::string& name, Use use);
  const Block* find(const DLTensor* given) const;
  void refuse_overlap(const DLTensor& given, const std::string& name) const;
  void check_written(const Block& block) const;

  std::string who_;
  std::deque<Block> blocks_;
  std::unique_ptr<GuardedMemory> workspace_;
  std::deque<std::vector<DLTensor*>> arrays_;
  bool poison_came_in_ = false;  // an input has an element that looks as if nobody wrote it
};

}  // namespace graft
