#include "core/base/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace graft {
namespace {

constexpr int bar_width = 22;

std::string pad_two(std::int64_t number) {
  return (number < 10 ? "0" : "") + std::to_string(number);
}

// Three digits are as much as a rate is good for.
std::string format_rate(double rate) {
  char buffer[32];
  const int decimals = rate >= 100 ? 0 : rate >= 10 ? 1 : rate >= 1 ? 2 : 3;
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, rate);
  return buffer;
}

std::string bar(std::int64_t done, std::int64_t total) {
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const int filled = static_cast<int>(share * bar_width);
  return "[" + std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(bar_width - filled), '-') + "]";
}

// Cut to `width` columns, not inside a UTF-8 sequence. (A wide character counts as one column.)
std::string fit(const std::string& line, int width) {
  int columns = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool starts_character = (static_cast<unsigned char>(line[i]) & 0xc0) != 0x80;
    if (starts_character && columns++ == width) return line.substr(0, i);
  }
  return line;
}

}  // namespace

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  const std::int64_t hours = whole / 3600, minutes = whole / 60 % 60;
  if (hours > 0) return std::to_string(hours) + ":" + pad_two(minutes) + ":" + pad_two(whole % 60);
  return std::to_string(minutes) + ":" + pad_two(whole % 60);
}

ProgressOptions progress_on_stderr() {
  ProgressOptions options;
  options.terminal = isatty(STDERR_FILENO) != 0;
  winsize size{};
  if (options.terminal && ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    options.width = size.ws_col;
  return options;
}

Progress::Progress(std::string label, std::int64_t total, std::string unit, std::int64_t done,
                   ProgressOptions options)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      total_(total),
      done_(done),
      done_before_(done),
      options_(std::move(options)),
      started_(options_.now()),
      shown_(started_) {
  show(false);
}

Progress::~Progress() {
  if (line_open_) std::fputc('\n', options_.stream);
}

void Progress::advance(std::int64_t n, const std::string& note) {
  done_ += n;
  note_ = note;
  const auto interval = options_.terminal ? options_.line_interval : options_.plain_interval;
  if (due_ || options_.now() - shown_ >= interval) show(false);
}

void Progress::finish(const std::string& note) {
  if (finished_) return;
  finished_ = true;
  if (!note.empty()) note_ = note;
  show(true);
}

void Progress::clear() {
  if (!line_open_) return;
  std::fputs("\r\x1b[K", options_.stream);
  std::fflush(options_.stream);
  line_open_ = false;
  due_ = true;
}

double Progress::elapsed() const {
  return std::chrono::duration<double>(options_.now() - started_).count();
}

double Progress::rate() const {
  const double seconds = elapsed();
  return seconds > 0 ? static_cast<double>(done_ - done_before_) / seconds : 0;
}

double Progress::seconds_left() const {
  const double per_second = rate();
  if (total_ <= 0 || per_second <= 0) return -1;
  return static_cast<double>(std::max<std::int64_t>(total_ - done_, 0)) / per_second;
}

std::string Progress::line(bool last) const {
  std::string out = label_;
  const auto add = [&](const std::string& part) { out += "  " + part; };
  const std::string unit = unit_.empty() ? "" : " " + unit_;
  if (total_ > 0) {
    if (options_.terminal) add(bar(done_, total_));
    add(std::to_string(done_) + "/" + std::to_string(total_) + unit);
  } else if (done_ > 0) {
    add(std::to_string(done_) + unit);
  }
  if (rate() > 0) add(format_rate(rate()) + unit + "/s");
  if (last) {
    add("in " + format_duration(elapsed()));
  } else if (seconds_left() >= 0) {
    add(format_duration(seconds_left()) + " left");
  }
  if (!note_.empty()) add(note_);
  return out;
}

void Progress::show(bool last) {
  if (options_.silent) return;
  if (options_.terminal) {
    // One column stays free: some terminals wrap when the last one is written.
    const std::string text =
        "\r" + fit(line(last), options_.width - 1) + "\x1b[K" + (last ? "\n" : "");
    std::fputs(text.c_str(), options_.stream);
    line_open_ = !last;
  } else {
    std::fputs((line(last) + "\n").c_str(), options_.stream);
  }
  std::fflush(options_.stream);
  shown_ = options_.now();
  due_ = false;
}

}  // namespace graft
