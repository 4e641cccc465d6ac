#include "group.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "watchdog.h"

namespace streamoverlap {
namespace {

constexpr std::chrono::milliseconds kRoomWait{1};
constexpr std::chrono::milliseconds kRecordWait{100};  // a claim without a record: its writer has died
constexpr std::size_t kMaxTexts = 4096;

void validate(const GroupConfig& config) {
  const auto expect = [&config](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument("group '" + config.name + "': " + what);
  };
  expect(config.world >= 1 && config.world <= plan::kMaxWorld,
         "world is " + std::to_string(config.world) + ", expected 1 to " + std::to_string(plan::kMaxWorld));
  expect(config.rank >= 0 && config.rank < config.world,
         "rank is " + std::to_string(config.rank) + ", expected 0 to " + std::to_string(config.world - 1));
  expect(config.slots >= 1 && config.slots <= kMaxSlots,
         "slots is " + std::to_string(config.slots) + ", expected 1 to " + std::to_string(kMaxSlots));
  expect(config.timeout.count() > 0,
         "timeout is " + std::to_string(config.timeout.count()) + " ms, expected more than 0");
}

}  // namespace

std::shared_ptr<Segment> make_control(const GroupConfig& config) {
  validate(config);
  const Layout layout(config.world, config.slots);
  auto segment = Segment::create(layout.bytes());
  Control(segment->data(), layout).initialise(config.rank);
  return segment;
}

Group::Group(GroupConfig config, std::vector<std::shared_ptr<Segment>> controls)
    : config_(std::move(config)),
      layout_(config_.world, config_.slots),
      controls_(std::move(controls)),
      timeout_(config_.timeout) {
  validate(config_);
  if (controls_.size() != static_cast<std::size_t>(world())) {
    throw std::invalid_argument("controls has " + std::to_string(controls_.size()) +
                                " segments, expected one for each of " + std::to_string(world()) + " ranks");
  }
  for (int rank = 0; rank < world(); ++rank) control(rank).validate(rank, controls_[rank]->bytes());
  watchdog_ = std::make_unique<Watchdog>(*this);
}

Group::~Group() { own().head().state.store(static_cast<std::uint32_t>(State::Closed), std::memory_order_release); }

void Group::set_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    throw std::invalid_argument("timeout is " + std::to_string(timeout.count()) + " ms, expected more than 0");
  }
  timeout_.store(timeout, std::memory_order_relaxed);
}

void Group::describe(std::uint32_t signature, const std::string& text) {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  if (texts_.size() >= kMaxTexts) texts_.clear();  // shapes may change for ever; calls to come describe themselves anew
  texts_[signature] = text;
}

bool Group::described(std::uint32_t signature) const {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  return texts_.count(signature) != 0;
}

std::string Group::text(std::uint32_t signature) const {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  const auto found = texts_.find(signature);
  return found != texts_.end() ? found->second : "";
}

void Group::add_awaited(std::uint32_t signature, const std::vector<plan::Flag>& flags) {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  std::vector<plan::Flag>& known = awaited_[signature];
  for (const plan::Flag& flag : flags) {
    if (std::find(known.begin(), known.end(), flag) == known.end()) known.push_back(flag);
  }
}

void Group::release_awaited() {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  for (int slot = 0; slot < layout_.slots(); ++slot) {
    const std::uint32_t signature = own().progress(slot).running.load(std::memory_order_acquire) & kSignatureMask;
    const auto found = awaited_.find(signature);
    if (found == awaited_.end()) continue;
    for (const plan::Flag& flag : found->second) {
      own().flag(slot, flag).store(set_value(flag, signature), std::memory_order_release);
    }
  }
}

std::vector<plan::Flag> Group::awaited(std::uint32_t signature) const {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  const auto found = awaited_.find(signature);
  return found != awaited_.end() ? found->second : std::vector<plan::Flag>{};
}

bool Group::abort(AbortRecord record) {
  std::uint32_t free = 0;
  if (!abort_word().compare_exchange_strong(free, kAbortClaimed)) return false;
  record.reporter = rank();
  set_text(record.op, text(record.signature));
  control(0).head().record = record;
  abort_word().store(kAbortPublished, std::memory_order_release);
  return true;
}

bool Group::fail(const std::string& cause, std::uint32_t own_signature) {
  AbortRecord record;
  record.culprit = rank();
  record.signature = own_signature;
  set_text(record.cause, cause);
  return abort(record);
}

bool Group::fail_peer(int peer, const std::string& cause, std::uint32_t own_signature, double elapsed) {
  AbortRecord record;
  record.kind = AbortKind::PeerTimeout;
  record.culprit = peer;
  record.signature = own_signature;
  record.elapsed = elapsed;
  set_text(record.cause, cause);
  return abort(record);
}

bool Group::abort_mismatch(int culprit, std::uint32_t own_signature, std::uint32_t found) {
  AbortRecord record;
  record.kind = AbortKind::Mismatch;
  record.culprit = culprit;
  record.signature = own_signature;
  record.other_signature = found;
  const std::string known = text(found);
  set_text(record.cause, known.empty() ? "something that rank " + std::to_string(rank()) + " has never called" : known);
  return abort(record);
}

AbortError Group::error(std::uint32_t own_signature) const {
  const auto deadline = std::chrono::steady_clock::now() + kRecordWait;
  while (abort_word().load(std::memory_order_acquire) != kAbortPublished) {
    if (std::chrono::steady_clock::now() > deadline) {
      AbortRecord unknown;
      set_text(unknown.cause, "it died while it reported a failure");
      return AbortError(unknown, name(), rank(), world(), text(own_signature));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  AbortRecord record = control(0).head().record;
  // The reporter knows its own calls only; this rank may know the other one.
  const std::string other = text(record.other_signature);
  if (record.kind == AbortKind::Mismatch && !other.empty()) set_text(record.cause, other);
  return AbortError(record, name(), rank(), world(), text(own_signature));
}

void Group::check() const {
  if (aborted()) throw error();
}

void Group::set_report_path(std::string path) {
  std::lock_guard<std::mutex> lock(texts_mutex_);
  report_path_ = std::move(path);
}

void Group::publish_report(std::string report) {
  std::string path;
  {
    std::lock_guard<std::mutex> lock(texts_mutex_);
    path = report_path_;
  }
  if (!path.empty()) {
    std::ofstream file(path, std::ios::app);
    file << report << std::endl;
    report += file ? "written to " + path : "could not be written to " + path;
  }
  {
    std::lock_guard<std::mutex> lock(texts_mutex_);
    report_ = std::move(report);
  }
  reported_.notify_all();
}

std::string Group::report(std::chrono::milliseconds wait) const {
  std::unique_lock<std::mutex> lock(texts_mutex_);
  reported_.wait_for(lock, wait, [this] { return !report_.empty(); });
  return report_;
}

void Group::await_serial_room(std::uint64_t number, std::uint32_t signature, const Poll& poll,
                              std::chrono::milliseconds timeout) {
  if (number < kSerialCalls) return;
  const std::uint64_t needed = number - (kSerialCalls - 1);
  const auto begin = std::chrono::steady_clock::now();
  for (int peer = 0; peer < world(); ++peer) {
    const LongWord& word = control(peer).head().serial[needed % kSerialCalls];
    while (peer != rank() && word.load() >> 32 < needed) {
      check();
      if (poll) poll();
      std::this_thread::sleep_for(kRoomWait);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      if (elapsed < (timeout.count() > 0 ? timeout : this->timeout())) continue;
      fail_peer(peer, "is " + std::to_string(kSerialCalls) + " serial calls behind", signature, elapsed.count());
      throw error(signature);
    }
  }
}

void Group::announce(LongWord& (*word_of)(ControlHead&, std::uint64_t), std::uint64_t number, std::uint32_t signature) {
  const auto word = [&](int rank) -> LongWord& { return word_of(control(rank).head(), number); };
  // Sequentially consistent, as are the loads: of two ranks that write, then read, one at least sees the other's word.
  word(rank()).store(number << 32 | signature);
  for (int peer = 0; peer < world(); ++peer) {
    const std::uint64_t theirs = word(peer).load();
    if (theirs >> 32 != number || static_cast<std::uint32_t>(theirs) == signature) continue;
    abort_mismatch(peer, signature, static_cast<std::uint32_t>(theirs));
    throw error(signature);
  }
}

std::uint32_t Group::enter_serial(std::uint32_t signature, const Poll& poll, std::chrono::milliseconds timeout) {
  check();
  const std::uint64_t number = ++serial_calls_;
  await_serial_room(number, signature, poll, timeout);
  const auto word = [](ControlHead& head, std::uint64_t n) -> LongWord& { return head.serial[n % kSerialCalls]; };
  announce(word, number, signature);
  return static_cast<std::uint32_t>(number);
}

void Group::enter_growth(std::uint32_t signature) {
  check();
  announce([](ControlHead& head, std::uint64_t) -> LongWord& { return head.growth; }, ++growths_, signature);
}

void Group::watch_serial(std::uint32_t number, std::uint32_t signature, std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(serial_mutex_);
  SerialCall& call = serial_[number];
  call.signature = signature;
  call.timeout = timeout;
}

void Group::fail_serial(std::uint32_t number, const std::string& cause) {
  std::lock_guard<std::mutex> lock(serial_mutex_);
  const auto found = serial_.find(number);
  if (found != serial_.end()) found->second.cause = cause;
}

void Group::leave_serial(std::uint32_t number) {
  std::lock_guard<std::mutex> lock(serial_mutex_);
  serial_.erase(number);
}

bool Group::in_serial() {
  std::lock_guard<std::mutex> lock(serial_mutex_);
  return !serial_.empty();
}

void Group::on_abort(std::function<bool()> release) { watchdog_->on_abort(std::move(release)); }

}  // namespace streamoverlap
