// What a test is at: the one thing that is known of a test whose process crashed or hung.
#pragma once

#include <string>
#include <string_view>

namespace graft::conformance {

// Remembered for the failure's text: doing("forward with tensor:x of a wrong shape"). Cheap.
void doing(std::string_view what);

// The memory through which a child's last doing() reaches its parent.
class SharedNote {
 public:
  SharedNote();
  ~SharedNote();
  SharedNote(const SharedNote&) = delete;
  SharedNote& operator=(const SharedNote&) = delete;

  // In the child: doing() writes here from now on.
  void take_over();
  std::string text() const;

 private:
  char* memory_;
};

}  // namespace graft::conformance
