#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../host/executor.h"
#include "backend.h"
#include "host_compute.h"

namespace streamoverlap {
namespace {

class HostCall : public InFlight {
 public:
  HostCall(std::shared_ptr<host::Pending> pending, Poll poll) : pending_(std::move(pending)), poll_(std::move(poll)) {}

  void join() override {
    pending_->wait();
    joined_ = true;
  }
  bool is_settled() override { return joined_; }
  bool is_completed() override { return joined_ || pending_->ended()->reached(); }
  bool wait_until(Clock::time_point deadline) override {
    return joined_ || pending_->ended()->wait_until(deadline, poll_);
  }
  void check() override { pending_->check(); }

 private:
  const std::shared_ptr<host::Pending> pending_;
  const Poll poll_;
  std::atomic<bool> joined_{false};  // the streams need a moment more to come to their ends
};

class HostBackend : public Backend {
 public:
  // `exchange`: none in a group of one.
  HostBackend(std::shared_ptr<Group> group, std::shared_ptr<FdExchange> exchange, Poll poll)
      : group_(std::move(group)),
        exchange_(std::move(exchange)),
        poll_(std::move(poll)),
        streams_(host::StreamSet::make()),
        executor_(group_, poll_) {}

  std::int64_t slot_bytes() const override { return executor_.slot_bytes(); }
  bool fits(std::int64_t slot_bytes) const override { return slot_bytes <= executor_.slot_bytes(); }

  void grow(std::int64_t slot_bytes, std::chrono::milliseconds timeout) override {
    auto own = Segment::create(static_cast<std::size_t>(slot_bytes) * group_->layout().slots());
    const Poll poll = [this] {
      poll_();
      group_->check();
    };
    auto segments =
        exchange_ == nullptr ? std::vector<std::shared_ptr<Segment>>{own} : exchange_->share(own, timeout, poll);
    executor_.use_slots(std::move(segments), slot_bytes);
  }

  std::unique_ptr<InFlight> issue(std::shared_ptr<const Problem> problem, const CallOptions& options) override {
    const Call& call = problem->call;
    try {
      return std::make_unique<HostCall>(
          executor_.issue(call, std::make_shared<HostCompute>(problem), streams_, options.timeout), poll_);
    } catch (const std::bad_alloc&) {
      const std::string cause =
          "could not allocate memory: " + std::to_string(call.scratch_bytes()) + " bytes of scratch";
      group_->fail(cause, call.signature);
      throw std::runtime_error(cause);
    }
  }

  std::uintptr_t op_stream(const CallOptions&) const override { return 0; }

  void prepare(const Problem&) override {}

  bool is_idle() const override { return executor_.is_idle(); }

  void set_before_op(host::BeforeOp hook) override { executor_.set_before_op(std::move(hook)); }

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<FdExchange> exchange_;
  Poll poll_;
  host::StreamSet streams_;
  host::Executor executor_;
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(std::shared_ptr<Group> group, std::shared_ptr<FdExchange> exchange,
                                           Poll poll) {
  return std::make_unique<HostBackend>(std::move(group), std::move(exchange), std::move(poll));
}

}  // namespace streamoverlap
