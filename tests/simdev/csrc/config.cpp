// The state behind config.h.
#include "config.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>

namespace simdev {

namespace {

constexpr size_t kMostViolations = 1000;

struct Notes {
  std::mutex mutex;
  std::map<std::string, uint64_t> counters;
  std::vector<std::string> violations;
};

Notes& notes() {
  static auto* made = new Notes();
  return *made;
}

}  // namespace

Config& config() {
  static auto* made = new Config();
  return *made;
}

int64_t configure(const std::string& name, int64_t value) {
  auto& c = config();
  static const std::map<std::string, std::atomic<int64_t>*> values{
      {"devices", &c.devices},
      {"stream_pool", &c.stream_pool},
      {"copy_delay_us", &c.copy_delay_us},
      {"copy_bytes_per_s", &c.copy_bytes_per_s},
      {"kernel_delay_us", &c.kernel_delay_us},
      {"jitter_us", &c.jitter_us},
      {"capacity", &c.capacity},
      {"middle_segment", &c.middle_segment},
      {"poison", &c.poison},
      {"blocking", &c.blocking},
      {"races", &c.races},
      {"timed_events", &c.timed_events},
      {"capturing", &c.capturing}};
  auto found = values.find(name);
  TORCH_CHECK(found != values.end(), "simdev has no setting ", name);
  return found->second->exchange(value);
}

void count(const char* name, uint64_t by) {
  std::lock_guard<std::mutex> lock(notes().mutex);
  notes().counters[name] += by;
}

std::vector<std::pair<std::string, uint64_t>> counters() {
  std::lock_guard<std::mutex> lock(notes().mutex);
  return {notes().counters.begin(), notes().counters.end()};
}

void report_violation(std::string what) {
  std::lock_guard<std::mutex> lock(notes().mutex);
  if (notes().violations.size() < kMostViolations) notes().violations.push_back(std::move(what));
}

std::vector<std::string> violations(bool clear) {
  std::lock_guard<std::mutex> lock(notes().mutex);
  auto found = notes().violations;
  if (clear) notes().violations.clear();
  return found;
}

}  // namespace simdev
