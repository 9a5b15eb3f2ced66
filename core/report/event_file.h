#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/report/run_metrics.h"

namespace graft {

// A run's figures as a TensorBoard event file FOLDER/events.out.tfevents.0.graft: TFRecords of
// tensorflow.Event messages with one simple_value each (tag, step). Written whole, anew each time.
// There is no small library for this; the format is two messages deep.
void write_events(const std::filesystem::path& folder, const RunMetrics& metrics);

// The file's content. Wall times are the steps' numbers: a run that is read again gives the same
// bytes.
std::string event_file(const RunMetrics& metrics);

// One TFRecord: length, masked CRC-32C of the length, data, masked CRC-32C of the data.
std::string tf_record(std::string_view data);
std::uint32_t crc32c(std::string_view data);

}  // namespace graft
