// The log of accesses behind races.h.
#include "races.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "config.h"

namespace simdev {

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void AccessLog::split_at(uintptr_t at) {
  auto next = cells_.upper_bound(at);
  if (next == cells_.begin()) return;
  auto cell = std::prev(next);
  if (cell->first < at && at < cell->second.end) {
    Cell right = cell->second;
    cell->second.end = at;
    cells_.emplace(at, std::move(right));
  }
}

void AccessLog::add(size_t stream, const Clock& clock, uint64_t when, const char* name, const Access& access) {
  if (access.begin >= access.end) return;
  split_at(access.begin);
  split_at(access.end);
  bool reported = false;
  auto check = [&](const Touch& before, const char* how, uintptr_t at) {
    bool known = before.stream == stream || (before.stream < clock.size() && before.when <= clock[before.stream]);
    if (known || std::exchange(reported, true)) return;
    std::ostringstream out;
    out << "race: " << name << " on stream " << stream << (access.write ? " writes" : " reads") << " 0x" << std::hex << at
        << std::dec << " (" << (access.end - access.begin) << " bytes), not ordered after " << before.name
        << " on stream " << before.stream << ", which " << how << " it";
    report_violation(out.str());
  };
  uintptr_t at = access.begin;
  std::vector<std::pair<uintptr_t, uintptr_t>> untouched;
  for (auto cell = cells_.lower_bound(access.begin); cell != cells_.end() && cell->first < access.end; ++cell) {
    if (at < cell->first) untouched.emplace_back(at, cell->first);
    at = cell->second.end;
    for (auto& touch : cell->second.writes) check(touch, "writes", cell->first);
    auto& reads = cell->second.reads;
    if (access.write) {
      for (auto& touch : reads) check(touch, "reads", cell->first);
      continue;
    }
    auto own = std::find_if(reads.begin(), reads.end(), [&](const Touch& touch) { return touch.stream == stream; });
    if (own == reads.end()) {
      reads.push_back({stream, when, name});
    } else {
      own->when = when, own->name = name;
    }
  }
  if (access.write) {
    forget(access.begin, access.end);
    cells_[access.begin] = {access.end, {{stream, when, name}}, {}};
    return;
  }
  if (at < access.end) untouched.emplace_back(at, access.end);
  for (auto& [begin, end] : untouched) cells_[begin] = {end, {}, {{stream, when, name}}};
}

void AccessLog::forget(uintptr_t begin, uintptr_t end) {
  split_at(begin);
  split_at(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

}  // namespace simdev
