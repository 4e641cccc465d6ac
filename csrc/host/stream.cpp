#include "stream.h"

#include <utility>

namespace streamoverlap::host {

Stream::Stream() : thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Stream::enqueue(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void Stream::run() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

StreamSet StreamSet::make() {
  StreamSet set{std::make_shared<Stream>(), std::make_shared<Stream>(), {}};
  for (auto& stream : set.compute) stream = std::make_shared<Stream>();
  return set;
}

Stream& StreamSet::at(plan::Stream role) const {
  if (role == plan::kSend) return *send;
  if (role == plan::kRecv) return *recv;
  return *compute.at(role - plan::kCompute);
}

}  // namespace streamoverlap::host
