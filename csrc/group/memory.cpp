#include "memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace streamoverlap {
namespace {

constexpr std::uint64_t kUnknown = std::numeric_limits<std::uint64_t>::max();

// Of a file of one number; "max", and a file that is not there, are kUnknown.
std::uint64_t number_in(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : kUnknown;
}

// Of a file of lines "name value".
std::uint64_t value_of(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t value = 0;
  while (file >> word) {
    if (word == name && file >> value) return value;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kUnknown;
}

std::uint64_t left_of(std::uint64_t limit, std::uint64_t used, std::uint64_t reclaimable) {
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  if (reclaimable != kUnknown) used -= std::min(used, reclaimable);
  return limit - std::min(limit, used);
}

// Path of the process' cgroup below the mount of `controller` (empty: version 2), such as "/user.slice".
std::string cgroup_path(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");  // lines "4:memory:/path", or "0::/path" of version 2
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers.find("," + controller + ",") != std::string::npos) return line.substr(second + 1);
  }
  return "";
}

// A limit holds for all groups below it.
template <class Left>
std::uint64_t least_upwards(const std::string& mount, std::string path, Left left) {
  std::uint64_t least = left(mount);
  while (path.size() > 1) {
    least = std::min(least, left(mount + path));
    path.erase(path.rfind('/'));
  }
  return least;
}

}  // namespace

std::uint64_t available_memory() {
  std::uint64_t available = value_of("/proc/meminfo", "MemAvailable:");
  if (available != kUnknown) available *= 1024;
  const auto version_2 = [](const std::string& group) {
    return left_of(number_in(group + "/memory.max"), number_in(group + "/memory.current"),
                   value_of(group + "/memory.stat", "inactive_file"));
  };
  const auto version_1 = [](const std::string& group) {
    return left_of(number_in(group + "/memory.limit_in_bytes"), number_in(group + "/memory.usage_in_bytes"),
                   value_of(group + "/memory.stat", "total_inactive_file"));
  };
  return std::min({available, least_upwards("/sys/fs/cgroup", cgroup_path(""), version_2),
                   least_upwards("/sys/fs/cgroup/memory", cgroup_path("memory"), version_1)});
}

}  // namespace streamoverlap
