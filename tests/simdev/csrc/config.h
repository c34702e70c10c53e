// What tests set and read: rates, delays and switches of the device, counters, and the violations it has seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace simdev {

struct Config {
  std::atomic<int64_t> devices{1};
  std::atomic<int64_t> stream_pool{32};      // side streams of a device; then they are handed out again, as CUDA's are
  std::atomic<int64_t> copy_delay_us{0};     // before the bytes of each copy between host and device move
  std::atomic<int64_t> copy_bytes_per_s{0};  // 0: as fast as memcpy
  std::atomic<int64_t> kernel_delay_us{0};   // before each kernel
  std::atomic<int64_t> jitter_us{0};         // up to so much, at random, before each kernel and copy
  std::atomic<int64_t> capacity{0};          // bytes of a device; 0: it reports 64 GiB and refuses none
  std::atomic<int64_t> middle_segment{20 << 20};  // bytes taken at once for blocks of more than 1 MiB, up to half of it
  std::atomic<int64_t> poison{0};            // freed blocks are overwritten by the stream that owns them
  std::atomic<int64_t> blocking{0};          // wait after each kernel and copy
  std::atomic<int64_t> races{0};             // check the order of every access. See races.h
  std::atomic<int64_t> timed_events{1};      // 0: a backend whose events keep no time
  std::atomic<int64_t> capturing{0};         // streams say that they record a graph, and refuse what cannot be recorded
};

Config& config();
// Sets a value by its name and returns the one before.
int64_t configure(const std::string& name, int64_t value);

void count(const char* name, uint64_t by = 1);
std::vector<std::pair<std::string, uint64_t>> counters();

void report_violation(std::string what);
std::vector<std::string> violations(bool clear);

}  // namespace simdev
