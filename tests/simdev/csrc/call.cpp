// The calls behind call.h.
#include "call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/clone.h>

#include "device_memory.h"
#include "generator.h"

namespace simdev {

at::Tensor Aliases::of(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  auto found = storages_.find(storage);
  if (found == storages_.end()) {
    c10::Storage made(
        c10::Storage::use_byte_size_t(), storage->nbytes(),
        c10::DataPtr(const_cast<void*>(storage->data()), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU),
        /*resizable=*/true);
    found = storages_.emplace(storage, std::move(made)).first;
  }
  c10::InferenceMode plain(false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

size_t extent_bytes(at::IntArrayRef sizes, at::IntArrayRef strides, size_t item) {
  return at::detail::computeStorageNbytes(sizes, strides, item);
}

Access access_of(const at::Tensor& tensor, bool write) {
  size_t item = tensor.element_size();
  auto* base = static_cast<const char*>(tensor.storage().data());
  if (!base || tensor.numel() == 0) return {};
  auto begin = reinterpret_cast<uintptr_t>(base) + tensor.storage_offset() * item;
  return {begin, begin + extent_bytes(tensor.sizes(), tensor.strides(), item), write};
}

bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

namespace {

template <class T>
void add(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void add_tensor(std::string& key, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key += 'u';
    return;
  }
  key += is_simulated(tensor) ? 'd' : 'c';
  key += tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 't';
  key += static_cast<char>(tensor.scalar_type());
  add(key, static_cast<int64_t>(tensor.dim()));
  for (auto n : tensor.sizes()) add(key, n);
  for (auto n : tensor.strides()) add(key, n);
}

// False: this argument cannot be part of a key.
bool add_value(std::string& key, const IValue& value, bool with_doubles) {
  if (value.isNone()) {
    key += 'n';
  } else if (value.isTensor()) {
    add_tensor(key, value.toTensor());
  } else if (value.isInt()) {
    key += 'i', add(key, value.toInt());
  } else if (value.isBool()) {
    key += value.toBool() ? 'T' : 'F';
  } else if (value.isDouble()) {
    key += 'f';
    if (with_doubles) add(key, value.toDouble());
  } else if (value.isString()) {
    key += 's', key += value.toStringRef(), key += '\0';
  } else if (value.isDevice() || value.isGenerator()) {
    key += 'D';
  } else if (value.isList()) {
    auto list = value.toListRef();
    key += 'l', add(key, list.size());
    for (auto& item : list)
      if (!add_value(key, item, with_doubles)) return false;
  } else {
    return false;
  }
  return true;
}

}  // namespace

Call::Call(const c10::OperatorHandle& handle, Stack arguments)
    : op(handle), schema(handle.schema()), given(std::move(arguments)) {
  for (auto& argument : schema.arguments()) {
    auto* info = argument.alias_info();
    writes.push_back(info && info->isWrite());
  }
  for (auto& value : given) find_device(value);
  if (device < 0)
    for (auto& value : given)
      if (value.isDevice() && value.toDevice().type() == kSim)
        device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
  if (device < 0) device = current_device();
}

void Call::find_device(const IValue& value) {
  if (value.isTensor()) {
    if (is_simulated(value.toTensor())) {
      int index = value.toTensor().device().index();
      TORCH_CHECK(device < 0 || device == index, "Expected all tensors to be on the same device");
      device = index;
    } else if (value.toTensor().defined() && value.toTensor().dim() > 0) {
      foreign = true;
    }
  } else if (value.isTensorList() || value.isList()) {
    for (auto& item : value.toListRef())
      if (item.isTensor()) find_device(item);
  }
}

// Replaces device tensors by CPU tensors over the same memory, and copies host tensors: their values are those of now.
IValue Call::convert(const IValue& value, bool write) {
  if (value.isTensor()) {
    auto& tensor = value.toTensor();
    if (!tensor.defined()) return value;
    if (is_simulated(tensor)) {
      auto alias = aliases.of(tensor);
      accesses.push_back(access_of(tensor, write));
      if (write) written.push_back(tensor), written_alias.push_back(alias);
      return alias;
    }
    if (write) return value;
    c10::InferenceMode plain(false);
    at::AutoDispatchBelowADInplaceOrView below;
    auto copied = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copied.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copied;
  }
  if (value.isTensorList()) {
    if (write) lists_written = true;
    std::vector<at::Tensor> made;
    for (const at::Tensor& item : value.toTensorVector()) made.push_back(convert(item, write).toTensor());
    return IValue(std::move(made));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& item : value.toListRef())
      made.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(convert(item, write).toTensor()));
    return IValue(std::move(made));
  }
  if (value.isDevice()) return IValue(c10::Device(c10::kCPU));
  if (value.isGenerator() && value.toGenerator().device().type() == kSim)
    return IValue(value.toGenerator().get<Generator>()->part());
  return value;
}

void Call::prepare() {
  for (size_t i = 0; i < given.size(); ++i) {
    bool generator = given[i].isNone() && schema.arguments()[i].type()->str() == "Generator?";
    on_cpu.push_back(
        generator ? IValue(default_generator(static_cast<c10::DeviceIndex>(device)).get<Generator>()->part())
                  : convert(given[i], writes[i]));
  }
}

bool Call::has_masks() const {
  for (auto& value : given)
    if (value.isOptionalTensorList() || value.isTensorList())
      for (const auto& item : value.toListRef())
        if (item.isTensor() && item.toTensor().defined() &&
            (item.toTensor().scalar_type() == at::kBool || item.toTensor().scalar_type() == at::kByte))
          return true;
  return false;
}

std::optional<std::string> Call::key() const {
  std::string made;
  add(made, &schema);
  bool any_written = false, empty_written = false;
  for (size_t i = 0; i < given.size(); ++i)
    if (writes[i] && given[i].isTensor() && given[i].toTensor().defined()) {
      any_written = true;
      empty_written |= given[i].toTensor().numel() == 0;
    }
  for (auto& value : given)
    if (!add_value(made, value, !any_written || empty_written)) return std::nullopt;
  return made;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::InferenceMode plain(false);
  at::AutoDispatchBelowADInplaceOrView again;
  op.callBoxed(&stack);
}

}  // namespace simdev
