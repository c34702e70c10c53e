// Operators that are no kernels, or not the CPU's: memory, storages and views, dropout with the device's random state,
// convolution.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "call.h"
#include "device_memory.h"

namespace simdev {

namespace {

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "simdev: strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "simdev: strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  std::vector<int64_t> size{static_cast<int64_t>(source.nbytes() / self.dtype().itemsize())}, stride{1};
  at::native::checkSetStorage(self, source, int64_t{0}, at::IntArrayRef(size), at::IntArrayRef(stride));
  self.unsafeGetTensorImpl()->set_storage_offset(0);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(size), at::IntArrayRef(stride));
  return self;
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  std::vector<int64_t> dense;
  if (strides.empty() && !sizes.empty()) {
    dense.assign(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i-- > 0;) dense[i] = dense[i + 1] * std::max<int64_t>(1, sizes[i + 1]);
    strides = dense;
  }
  at::native::checkSetStorage(self, source, offset.expect_int(), sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  size_t need = sizes.size() && self.numel() == 0
      ? 0
      : extent_bytes(sizes, strides, self.element_size()) + offset.expect_int() * self.element_size();
  if (need > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_nothing(at::Tensor& self) {
  auto storage = at::detail::empty_generic(
                     {0}, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), self.scalar_type(),
                     std::nullopt)
                     .storage();
  return set_storage_offset(self, storage, 0, c10::SymIntArrayRef(std::vector<c10::SymInt>{0}), {});
}

void record_stream(at::Tensor& self, c10::Stream stream) { use_on_stream(self.storage().data(), stream); }

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0) return {input, at::empty_like(input, input.options())};
  if (train.has_value() && !*train)
    return {input.clone(), at::ones(input.sizes(), input.options().dtype(at::kBool))};
  double kept = 1.0 - p;
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  mask.bernoulli_(kept);
  // As CUDA's kernel: half types are scaled in float32, and the scale is that of the probability in that type.
  auto type = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (type == at::kFloat) kept = static_cast<float>(kept);
  return {input.to(type).mul(mask).mul_(kept == 0 ? 0.0 : 1.0 / kept).to(input.scalar_type()), mask};
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Stack stack;
  torch::jit::push(
      stack, input, weight, bias, C10_AS_INTARRAYREF_SLOW(stride).vec(), C10_AS_INTARRAYREF_SLOW(padding).vec(),
      C10_AS_INTARRAYREF_SLOW(dilation).vec(), transposed, C10_AS_INTARRAYREF_SLOW(output_padding).vec(),
      groups.expect_int());
  run(op, &stack);
  return stack.at(0).toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  Stack stack;
  IValue sizes;
  if (mask[2]) sizes = std::vector<int64_t>{grad.size(1)};
  c10::List<bool> wanted({mask[0], mask[1], mask[2]});
  torch::jit::push(
      stack, grad, input, weight, sizes, C10_AS_INTARRAYREF_SLOW(stride).vec(), C10_AS_INTARRAYREF_SLOW(padding).vec(),
      C10_AS_INTARRAYREF_SLOW(dilation).vec(), transposed, C10_AS_INTARRAYREF_SLOW(output_padding).vec(),
      groups.expect_int(), wanted);
  run(op, &stack);
  return {stack.at(0).toTensor(), stack.at(1).toTensor(), stack.at(2).toTensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace

}  // namespace simdev
