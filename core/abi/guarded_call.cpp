#include "core/abi/guarded_call.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/abi/strict.h"

namespace graft {
namespace {

// Wide enough for a row of a small tensor: most wrong indices land in it.
constexpr std::uint64_t kGuardBytes = 4096;
constexpr std::byte kGuard{0xA5}, kPoison{0xFF};
constexpr std::uint64_t kTensorAlignment = 64, kWorkspaceAlignment = 256;

std::uint64_t element_bytes(const DLTensor& tensor) {
  return (std::uint64_t{tensor.dtype.bits} * tensor.dtype.lanes + 7) / 8;
}

bool is_float(const DLTensor& tensor) {
  return tensor.dtype.code == kDLFloat || tensor.dtype.code == kDLBfloat;
}

std::uint64_t bytes_of(const DLTensor& tensor) {
  std::uint64_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i)
    count *= static_cast<std::uint64_t>(tensor.shape[i]);
  return count * element_bytes(tensor);
}

bool all_are(const std::byte* from, std::uint64_t bytes, std::byte value) {
  return std::all_of(from, from + bytes, [&](std::byte b) { return b == value; });
}

// The index of the first element that still is as the poison left it, or -1.
std::int64_t first_poisoned(const std::byte* data, std::uint64_t bytes, std::uint64_t element) {
  for (std::uint64_t at = 0; at + element <= bytes; at += element)
    if (all_are(data + at, element, kPoison)) return static_cast<std::int64_t>(at / element);
  return -1;
}

}  // namespace

// ---------------------------------------------------------------- memory

GuardedMemory::GuardedMemory(std::uint64_t bytes, std::uint64_t alignment) : bytes_(bytes) {
  const std::uint64_t all = bytes + 2 * kGuardBytes;
  memory_.reset(static_cast<std::byte*>(
      std::aligned_alloc(alignment, (all + alignment - 1) / alignment * alignment)));
  if (memory_ == nullptr) throw std::bad_alloc();
  data_ = memory_.get() + kGuardBytes;
  std::fill_n(memory_.get(), kGuardBytes, kGuard);
  std::fill_n(data_, bytes, kPoison);
  std::fill_n(data_ + bytes, kGuardBytes, kGuard);
}

void GuardedMemory::Free::operator()(std::byte* memory) const { std::free(memory); }

std::string GuardedMemory::overrun() const {
  if (!all_are(memory_.get(), kGuardBytes, kGuard)) return "before the start of";
  if (!all_are(data_ + bytes_, kGuardBytes, kGuard)) return "past the end of";
  return "";
}

// ---------------------------------------------------------------- one call

DLTensor* GuardedCall::input(const DLTensor* given, const std::string& name) {
  return add(given, name, Use::input);
}

DLTensor* GuardedCall::output(const DLTensor* given, const std::string& name) {
  return add(given, name, Use::output);
}

DLTensor* GuardedCall::inout(const DLTensor* given, const std::string& name) {
  auto* const block = given == nullptr ? nullptr : const_cast<Block*>(find(given));
  if (block == nullptr) return add(given, name, Use::inout);
  block->use = Use::inout;
  return &block->copy;
}

DLTensor* GuardedCall::add(const DLTensor* given, const std::string& name, Use use) {
  if (given == nullptr) return nullptr;
  check_promised(given, who_, name);
  const std::uint64_t bytes = bytes_of(*given);
  // The ABI passes inputs as pointers to const and outputs not; here they are all the same.
  if (bytes == 0) return const_cast<DLTensor*>(given);
  if (use != Use::input) refuse_overlap(*given, name);
  Block& block = blocks_.emplace_back(
      Block{name, use, *given, *given, GuardedMemory(bytes, kTensorAlignment), {}});
  block.copy.data = block.memory.data();
  if (use == Use::output) return &block.copy;
  std::memcpy(block.memory.data(), given->data, bytes);
  if (use == Use::inout) block.before.assign(block.memory.data(), block.memory.data() + bytes);
  if (is_float(*given))
    poison_came_in_ =
        poison_came_in_ || first_poisoned(block.memory.data(), bytes, element_bytes(*given)) >= 0;
  return &block.copy;
}

void* GuardedCall::workspace(const graft_exec& exec) {
  check_promised(exec, who_);
  if (exec.workspace == nullptr) return nullptr;
  workspace_ = std::make_unique<GuardedMemory>(exec.workspace_bytes, kWorkspaceAlignment);
  return workspace_->data();
}

const DLTensor* const* GuardedCall::inputs(const DLTensor* const* given, std::uint32_t n,
                                           const NameOf& name) {
  if (given == nullptr) return nullptr;
  std::vector<DLTensor*>& array = arrays_.emplace_back();
  for (std::uint32_t i = 0; i < n; ++i) array.push_back(input(given[i], name(i)));
  return array.data();
}

DLTensor* const* GuardedCall::outputs(DLTensor* const* given, std::uint32_t n, const NameOf& name) {
  if (given == nullptr) return nullptr;
  std::vector<DLTensor*>& array = arrays_.emplace_back();
  for (std::uint32_t i = 0; i < n; ++i) array.push_back(output(given[i], name(i)));
  return array.data();
}

DLTensor* const* GuardedCall::inouts(DLTensor* const* given, std::uint32_t n, const NameOf& name) {
  if (given == nullptr) return nullptr;
  std::vector<DLTensor*>& array = arrays_.emplace_back();
  for (std::uint32_t i = 0; i < n; ++i) array.push_back(inout(given[i], name(i)));
  return array.data();
}

const GuardedCall::Block* GuardedCall::find(const DLTensor* given) const {
  const auto same = [&](const Block& block) { return block.given.data == given->data; };
  const auto found = std::find_if(blocks_.begin(), blocks_.end(), same);
  return found == blocks_.end() ? nullptr : &*found;
}

bool GuardedCall::is_changed(const DLTensor* given) const {
  const Block* const block = find(given);
  return block != nullptr &&
         !std::equal(block->before.begin(), block->before.end(), block->memory.data());
}

void GuardedCall::refuse_overlap(const DLTensor& given, const std::string& name) const {
  const auto* const begin = static_cast<const std::byte*>(given.data);
  const std::byte* const end = begin + bytes_of(given);
  for (const Block& other : blocks_) {
    const auto* const from = static_cast<const std::byte*>(other.given.data);
    if (begin < from + other.memory.size() && from < end)
      blame_host(who_, "output " + name + " overlaps " + other.name);
  }
}

void GuardedCall::publish() {
  for (const Block& block : blocks_)
    if (block.use != Use::input)
      std::memcpy(block.given.data, block.memory.data(), block.memory.size());
}

void GuardedCall::finish() {
  const auto check_guard = [&](const GuardedMemory& memory, const std::string& name) {
    const std::string where = memory.overrun();
    if (!where.empty()) blame_plugin(who_, "wrote " + where + " " + name);
  };
  if (workspace_) check_guard(*workspace_, "the workspace");
  for (const Block& block : blocks_) check_guard(block.memory, block.name);
  for (const Block& block : blocks_) {
    const bool changed =
        block.use == Use::input &&
        std::memcmp(block.given.data, block.memory.data(), block.memory.size()) != 0;
    if (changed) blame_plugin(who_, "changed its input " + block.name);
  }
  for (const Block& block : blocks_) check_written(block);
  publish();
}

// Integers may have any bits; a float with all of them set nobody computes.
void GuardedCall::check_written(const Block& block) const {
  if (block.use != Use::output || !is_float(block.given)) return;
  const std::uint64_t bytes = block.memory.size();
  if (all_are(block.memory.data(), bytes, kPoison))
    blame_plugin(who_, "did not write " + block.name);
  if (poison_came_in_) return;
  const std::int64_t at = first_poisoned(block.memory.data(), bytes, element_bytes(block.given));
  if (at >= 0)
    blame_plugin(who_, "did not write element " + std::to_string(at) + " of " + block.name +
                           ", or computed it from memory that nobody wrote");
}

}  // namespace graft
