#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace graft {

struct ProgressOptions {
  std::FILE* stream = stderr;
  bool terminal = false;  // rewrite one line; otherwise write whole lines
  int width = 80;         // columns of the terminal
  // Least time between two updates of the line, and between two plain lines.
  std::chrono::milliseconds line_interval{100};
  std::chrono::milliseconds plain_interval{5000};
  bool silent = false;
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

// What the process's standard error is: a terminal with its width, or not.
ProgressOptions progress_on_stderr();

// The progress of long work: done of total, rate and time left.
//
//   calibrate  [#########-------------]  12/30 layers  0.42 layers/s  0:43 left  loss 0.031
//
// On a terminal one line is rewritten; elsewhere (a file, a pipe, CI) a plain line is written every
// few seconds. The rate counts only what this process did: units done before (a resumed run) are in
// `done`, not in the rate. Not thread-safe.
class Progress {
 public:
  // `total` 0 = unknown: then neither bar nor time left. `done` = units finished before this
  // process started.
  Progress(std::string label, std::int64_t total, std::string unit, std::int64_t done = 0,
           ProgressOptions options = progress_on_stderr());
  // Leaves the line as it is and ends it: an interrupted or failed run shows how far it came.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Takes the line off the terminal, so that something else can be written; the next advance()
  // shows it again.
  void clear();
  // n units more are done; `note` stands at the end of the line.
  void advance(std::int64_t n = 1, const std::string& note = "");
  // The last line, with the whole time.
  void finish(const std::string& note = "");

  std::int64_t done() const { return done_; }
  // Units per second of this process; 0 as long as nothing is done.
  double rate() const;
  // Seconds left at that rate; negative when it cannot be told.
  double seconds_left() const;

 private:
  double elapsed() const;
  std::string line(bool last) const;
  void show(bool last);

  std::string label_, unit_, note_;
  std::int64_t total_, done_, done_before_;
  ProgressOptions options_;
  std::chrono::steady_clock::time_point started_, shown_;
  bool finished_ = false, line_open_ = false;
  bool due_ = false;  // the next advance() shows the line, whatever the time
};

// "0:07", "12:30", "1:02:05"; days as hours.
std::string format_duration(double seconds);

}  // namespace graft
