#include "core/report/event_file.h"

#include <array>
#include <bit>
#include <cmath>

#include "core/base/file.h"

namespace graft {
namespace {

template <typename T>
void append_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i)
    out += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
}

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7)
    out += static_cast<char>(static_cast<unsigned char>(value | 0x80));
  out += static_cast<char>(static_cast<unsigned char>(value));
}

// protobuf's wire types.
enum class Wire : std::uint64_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void append_key(std::string& out, std::uint64_t field, Wire wire) {
  append_varint(out, field << 3 | static_cast<std::uint64_t>(wire));
}

void append_bytes(std::string& out, std::uint64_t field, std::string_view bytes) {
  append_key(out, field, Wire::bytes);
  append_varint(out, bytes.size());
  out += bytes;
}

// Event {double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5}.
std::string event(std::int64_t step, double wall_time) {
  std::string out;
  append_key(out, 1, Wire::fixed64);
  append_little_endian(out, std::bit_cast<std::uint64_t>(wall_time));
  append_key(out, 2, Wire::varint);
  append_varint(out, static_cast<std::uint64_t>(step));
  return out;
}

// Where a figure belongs on the axes: its step, and the time of its line.
struct At {
  std::int64_t step;
  double wall_time;
};

// Lines hold seconds of training alone. Counted back from when the last one was written they give
// the time of the clock, but for pauses of the run.
double wall_time(const RunMetrics& metrics, double seconds) {
  return metrics.written - (metrics.seconds - seconds);
}

// Summary {repeated Value value = 1}, Value {string tag = 1; float simple_value = 2}.
void add_scalar(std::string& file, const std::string& tag, const At& at, double figure) {
  if (!std::isfinite(figure)) return;
  std::string value, summary, message = event(at.step, at.wall_time);
  append_bytes(value, 1, tag);
  append_key(value, 2, Wire::fixed32);
  append_little_endian(value, std::bit_cast<std::uint32_t>(static_cast<float>(figure)));
  append_bytes(summary, 1, value);
  append_bytes(message, 5, summary);
  file += tf_record(message);
}

}  // namespace

std::uint32_t crc32c(std::string_view data) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> entries{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
      entries[i] = crc;
    }
    return entries;
  }();
  std::uint32_t crc = 0xffffffffu;
  for (const char c : data) crc = (crc >> 8) ^ table[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return ~crc;
}

std::string tf_record(std::string_view data) {
  const auto masked = [](std::string_view bytes) {
    const std::uint32_t crc = crc32c(bytes);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  std::string record;
  append_little_endian(record, static_cast<std::uint64_t>(data.size()));
  append_little_endian(record, masked(record));
  record += data;
  append_little_endian(record, masked(data));
  return record;
}

std::string event_file(const RunMetrics& metrics) {
  std::string file, first = event(0, wall_time(metrics, 0));
  append_bytes(first, 3, "brain.Event:2");
  file += tf_record(first);
  for (const auto& stage : metrics.stages)
    for (const auto& step : stage.steps) {
      const At at{step.step, wall_time(metrics, step.seconds)};
      add_scalar(file, "train/loss", at, step.loss);
      for (const auto& [name, value] : step.parts) add_scalar(file, "train/" + name, at, value);
      for (const auto& [layer, value] : step.by_layer)
        add_scalar(file, "layer/" + std::to_string(layer), at, value);
      add_scalar(file, "train/lr", at, step.lr);
      add_scalar(file, "train/grad_norm", at, step.grad_norm);
      add_scalar(file, "train/tokens_per_second", at, step.tokens_per_second);
    }
  for (const auto& evaluation : metrics.evaluations) {
    const At at{evaluation.step, wall_time(metrics, evaluation.seconds)};
    add_scalar(file, "held_out/perplexity", at, evaluation.perplexity);
    add_scalar(file, "held_out/agreement", at, evaluation.agreement);
    add_scalar(file, "held_out/next_token", at, evaluation.next_token);
  }
  return file;
}

void write_events(const std::filesystem::path& folder, const RunMetrics& metrics) {
  std::filesystem::create_directories(folder);
  write_file_atomically(folder / "events.out.tfevents.0.graft", event_file(metrics));
}

}  // namespace graft
