// A test in a process of its own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>

#include "graft/conformance/conformance.hpp"
#include "kit/doing.h"

namespace graft::conformance {

// Starts `work` in a child; what it returns comes back, and so does what the child printed.
class Child {
 public:
  explicit Child(const std::function<std::string()>& work);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Readable when there is something to read: for poll().
  int answer_fd() const { return answer_; }
  // Reads what is there; true when the child is done with its answer.
  bool advance();
  void kill();
  double seconds() const;

  struct End {
    bool answered = false;
    std::string answer;   // what work() returned
    std::string trouble;  // "is ended by signal 11 (Segmentation fault)", "ends the process with
                          // exit code 7"; "" if none
    std::string doing;    // the last that the child said it is doing()
    std::string printed;  // on stdout and stderr
  };
  // Waits for the end.
  End finish();

 private:
  pid_t pid_ = -1;
  int answer_ = -1, printed_ = -1;
  SharedNote note_;
  std::string answer_text_;
  std::chrono::steady_clock::time_point start_;
};

// run_in_child() in two halves, so that several can run side by side.
class TestRun {
 public:
  TestRun(const Test& test, const Subject& subject, const Settings& settings);
  // Waits at most `for_ms`; true when result() is there.
  bool wait(std::chrono::milliseconds for_ms);
  const Result& result() const { return result_; }

 private:
  void finish(bool timed_out);
  Child child_;
  std::chrono::milliseconds timeout_;
  Result result_;
};

}  // namespace graft::conformance
