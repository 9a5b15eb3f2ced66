#include <algorithm>
#include <deque>
#include <exception>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "core/abi/guarded_call.h"
#include "core/abi/strict.h"
#include "core/abi/strict_calls.h"
#include "core/base/suggest.h"
#include "graft/status.hpp"

namespace graft {
namespace {

// A list of named tensors on the copies of a GuardedCall.
class GuardedList {
 public:
  enum class Use { read, write };
  GuardedList(const std::string& who, const char* kind, const graft_named_tensor* const* given,
              std::uint32_t n, Use use)
      : guard_(who), kind_(kind), given_(given, given + n) {
    for (const graft_named_tensor* tensor : given_) {
      if (tensor == nullptr || tensor->tensor == nullptr)
        blame_host(who, std::string("a ") + kind + " is NULL");
      graft_named_tensor& copy = copies_.emplace_back(*tensor);
      copy.tensor = use == Use::read ? guard_.input(tensor->tensor, label(*tensor))
                                     : guard_.inout(tensor->tensor, label(*tensor));
      pointers_.push_back(&copy);
    }
  }
  const graft_named_tensor* const* data() const { return pointers_.data(); }
  std::string label(const graft_named_tensor& tensor) const {
    return kind_ + (" " + quoted(tensor.name));
  }
  GuardedCall& guard() { return guard_; }

 private:
  GuardedCall guard_;
  const char* kind_;
  std::vector<const graft_named_tensor*> given_;
  std::deque<graft_named_tensor> copies_;
  std::vector<const graft_named_tensor*> pointers_;
};

// graft_init_args as an initializer sees them: tensors on guarded copies, and calls to the host
// through this object.
class StrictInit {
 public:
  StrictInit(const std::string& who, const graft_init_args& host)
      : who_(who),
        host_(host),
        teacher_(who, "teacher's tensor", host.teacher, host.n_teacher, GuardedList::Use::read),
        student_(who, "parameter", host.student, host.n_student, GuardedList::Use::write),
        written_(host.n_student, 1),
        seen_(host) {
    std::fill_n(written_.data(), host.n_student, std::byte{0});
    seen_.teacher = teacher_.data();
    seen_.student = student_.data();
    seen_.student_written = reinterpret_cast<std::uint8_t*>(written_.data());
    install();
  }
  StrictInit(const StrictInit&) = delete;
  StrictInit& operator=(const StrictInit&) = delete;

  const graft_init_args& seen() const { return seen_; }

  // What was found while run() ran, which the plugin could only pass on as text.
  void rethrow() const {
    if (found_) std::rethrow_exception(found_);
  }

  // After a run() that succeeded.
  void finish() {
    end_batch();
    teacher_.guard().finish();
    const std::string overrun = written_.overrun();
    if (!overrun.empty()) blame_plugin(who_, "wrote " + overrun + " student_written");
    for (std::uint32_t i = 0; i < host_.n_student; ++i) check_said(i);
    student_.guard().finish();
  }

 private:
  void check_said(std::uint32_t i) {
    const graft_named_tensor& tensor = *host_.student[i];
    const bool said = written_.data()[i] != std::byte{0};
    if (!said && student_.guard().is_changed(tensor.tensor))
      blame_plugin(who_, "changed " + student_.label(tensor) + ", but not its student_written");
    host_.student_written[i] = said ? 1 : 0;
  }

  void install() {
    seen_.ctx = this;
    seen_.next_batch = [](void* ctx, const graft_named_tensor* const** signals, std::uint32_t* n,
                          graft_error* error) {
      return guarded(ctx, "next_batch", error,
                     [&](StrictInit& self) { return self.next_batch(signals, n, error); });
    };
    seen_.rewind = [](void* ctx, graft_error* error) {
      return guarded(ctx, "rewind", error, [&](StrictInit& self) {
        self.end_batch();
        return self.host_.rewind(self.host_.ctx, error);
      });
    };
    seen_.probe = [](void* ctx, std::uint32_t n, const char* const* taps, const DLTensor** out,
                     graft_error* error) {
      return guarded(ctx, "probe", error, [&](StrictInit& self) {
        // The mixer runs with the parameters as they stand now.
        self.student_.guard().publish();
        return self.host_.probe(self.host_.ctx, n, taps, out, error);
      });
    };
  }

  template <class Work>
  static graft_status guarded(void* ctx, const char* name, graft_error* error, Work&& work) {
    auto& self = *static_cast<StrictInit*>(ctx);
    try {
      if (std::this_thread::get_id() != self.thread_)
        blame_plugin(self.who_, std::string("calls ") + name + "() on another thread than run()'s");
      return work(self);
    } catch (const std::exception& e) {
      if (!self.found_) self.found_ = std::current_exception();
      return sdk::detail::fill_error(error, GRAFT_INTERNAL, name, e.what());
    }
  }

  graft_status next_batch(const graft_named_tensor* const** signals, std::uint32_t* n,
                          graft_error* error) {
    end_batch();
    const graft_status status = host_.next_batch(host_.ctx, signals, n, error);
    if (status != GRAFT_OK) return status;
    batch_.emplace(who_, "signal", *signals, *n, GuardedList::Use::read);
    *signals = batch_->data();
    return status;
  }

  // The signals of a batch live until the next.
  void end_batch() {
    if (batch_) batch_->guard().finish();
    batch_.reset();
  }

  const std::string& who_;
  const graft_init_args& host_;
  const std::thread::id thread_ = std::this_thread::get_id();
  GuardedList teacher_, student_;
  GuardedMemory written_;
  std::optional<GuardedList> batch_;
  graft_init_args seen_;
  std::exception_ptr found_;
};

void check_args(const std::string& who, const graft_exec& exec, const graft_init_args& args) {
  if (exec.workspace != nullptr) blame_host(who, "an initializer has no workspace");
  if (args.layer == nullptr) blame_host(who, "layer is NULL");
  if (args.mixer == nullptr) blame_host(who, "mixer is NULL");
  if (args.student_written == nullptr && args.n_student > 0)
    blame_host(who, "student_written is NULL");
  if (args.next_batch == nullptr || args.rewind == nullptr || args.probe == nullptr)
    blame_host(who, "next_batch, rewind or probe is NULL");
}

}  // namespace

void strict_initializer(const std::string& who, const graft_exec& exec, const graft_init_args& args,
                        const InitCall& call) {
  check_args(who, exec, args);
  StrictInit strict(who, args);
  try {
    call(exec, strict.seen());
  } catch (...) {
    strict.rethrow();
    throw;
  }
  strict.rethrow();
  strict.finish();
}

}  // namespace graft
