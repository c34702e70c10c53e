// Copies between host and device and on the device; a copy of pinned memory is asynchronous if it is asked to be.
#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <cstring>

#include "call.h"
#include "host_memory.h"

namespace simdev {

namespace {

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense();
}

// A copy between host and device of tensors whose bytes lie in the same order.
void copy_bytes(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool out = is_simulated(source);
  auto& host = out ? target : source;
  auto stream = current_stream((out ? source : target).device().index());
  size_t nbytes = source.nbytes();
  auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(const_cast<void*>(target.const_data_ptr()));
  bool pinned = is_pinned(host.const_data_ptr());
  auto whole = [](const at::Tensor& t, bool write) {
    auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    return Access{begin, begin + t.nbytes(), write};
  };
  std::vector<Access> accesses{whole(out ? source : target, !out)};
  if (pinned) accesses.push_back(whole(host, out));
  const char* name = out ? "copy_out" : "copy_in";
  if (non_blocking) count(out ? "bytes_out" : "bytes_in", nbytes);
  if (non_blocking && out && is_registered(host.const_data_ptr())) count("registered_bytes_out", nbytes);
  count(!non_blocking ? "copies_blocking" : pinned ? "copies_async" : "copies_pageable");
  if (non_blocking && !pinned && !out) {  // the runtime reads pageable memory before it returns
    auto staged = std::make_shared<std::vector<char>>(from, from + nbytes);
    enqueue(stream, Kind::copy, name, [staged, to, nbytes] { std::memcpy(to, staged->data(), nbytes); },
        std::move(accesses), nbytes);
    return;
  }
  enqueue(stream, Kind::copy, name, [from, to, nbytes] { std::memcpy(to, from, nbytes); }, std::move(accesses), nbytes);
  if (non_blocking && pinned) {
    note_host_copy(host.const_data_ptr(), nbytes, stream);
    return;
  }
  synchronize_stream(stream);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  at::AutoDispatchBelowADInplaceOrView below;
  auto source = self.sizes() == dst.sizes() ? self : self.expand_as(dst);
  const c10::DeviceGuard guard(is_simulated(dst) ? dst.device() : self.device());
  if (is_simulated(source) && is_simulated(dst)) {
    Aliases aliases;
    auto from = aliases.of(source), to = aliases.of(dst);
    if (source.is_conj() != dst.is_conj() || source.is_neg() != dst.is_neg()) {
      TORCH_CHECK(false, "simdev: lazy conjugation");
    }
    enqueue(current_stream(dst.device().index()), Kind::kernel, "copy_",
        [from, to] {
          at::AutoDispatchBelowADInplaceOrView inner;
          const_cast<at::Tensor&>(to).copy_(from);
        },
        {access_of(source, false), access_of(dst, true)});
    return dst;
  }
  if (same_bytes(source, dst)) {
    copy_bytes(source, dst, non_blocking);
    return dst;
  }
  auto flat = source.to(dst.scalar_type()).contiguous();  // where it is
  if (dst.is_contiguous()) {
    copy_bytes(flat, dst, non_blocking);
    return dst;
  }
  auto landed = at::empty(dst.sizes(), dst.options().memory_format(at::MemoryFormat::Contiguous));
  copy_bytes(flat, landed, is_simulated(dst) && non_blocking);
  const_cast<at::Tensor&>(dst).copy_(landed, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  const_cast<at::Tensor&>(dst).copy_(self);
  return dst;
}

at::Scalar local_scalar(const at::Tensor& self) {
  Aliases aliases;
  auto alias = aliases.of(self);
  auto stream = current_stream(self.device().index());
  at::Scalar found;
  count("host_waits");
  run_and_wait(stream, "item", [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    found = alias.item();
  }, {access_of(self, false)});
  raise_late_error();
  return found;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

}  // namespace

}  // namespace simdev
