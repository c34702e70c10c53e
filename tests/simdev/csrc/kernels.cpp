// Every operator of the device: the CPU's kernel over device memory, run by the stream.
//
// [Note: late kernels]
// The caller goes on at once, with tensors whose values come later. Their shapes must be known before: the first call of
// an operator with arguments of some shapes waits for its kernel and notes the shapes; later ones do not wait. An
// operator whose shapes depend on values always waits, as on a real device. So one warm-up step hides no mistake in
// ordering: training must run two steps or more.
#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <memory>
#include <mutex>

#include "call.h"

namespace simdev {

namespace {

struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool operator==(const Shape& o) const {
    return defined == o.defined && (!defined || (sizes == o.sizes && strides == o.strides && dtype == o.dtype));
  }
};

Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

struct Known {
  std::vector<std::vector<Shape>> fresh;  // for each result that is new: its tensors
  std::vector<Shape> written;             // for each written argument that is a tensor
};

std::mutex g_known_mutex;
std::unordered_map<std::string, std::shared_ptr<const Known>>& known_calls() {
  static auto* made = new std::unordered_map<std::string, std::shared_ptr<const Known>>();
  return *made;
}

bool returns_fresh(const c10::Argument& result) {
  auto kind = result.type()->kind();
  bool tensors = result.type()->isSubtypeOf(*c10::ListType::ofTensors()) || kind == c10::TypeKind::TensorType;
  return tensors && !result.alias_info();
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

IValue pack(const c10::Argument& result, std::vector<at::Tensor> tensors) {
  if (result.type()->kind() == c10::TypeKind::TensorType) return IValue(std::move(tensors.at(0)));
  return IValue(std::move(tensors));
}

// A result that is an argument.
IValue returned_argument(const Call& call, const c10::Argument& result) {
  auto* info = result.alias_info();
  for (size_t i = 0; i < call.given.size(); ++i) {
    auto* of = call.schema.arguments()[i].alias_info();
    if (of && info && of->beforeSets() == info->beforeSets()) return call.given[i];
  }
  TORCH_CHECK(false, "simdev: ", call.schema.operator_name(), " returns an argument that is not found");
}

struct Target {
  char* data;
  size_t nbytes;
  Shape shape;
};

void store(const at::Tensor& found, const Target& target) {
  if (!target.shape.defined || target.nbytes == 0) return;
  std::memcpy(target.data, found.const_data_ptr(), target.nbytes);
}

Target target_of(const at::Tensor& made) {
  if (!made.defined()) return {nullptr, 0, {}};
  size_t nbytes = made.numel() ? extent_bytes(made.sizes(), made.strides(), made.element_size()) : 0;
  return {const_cast<char*>(static_cast<const char*>(made.storage().data())), nbytes, shape_of(made)};
}

at::Tensor make(int device, const Shape& shape) {
  if (!shape.defined) return {};
  return empty_on(device, shape.sizes, shape.strides, shape.dtype);
}

void push_results(Call& call, Stack* stack, const std::vector<std::vector<at::Tensor>>& fresh) {
  size_t next = 0;
  for (auto& result : call.schema.returns())
    stack->push_back(returns_fresh(result) ? pack(result, fresh.at(next++)) : returned_argument(call, result));
}

// Waits for the kernel, takes its results over, and notes their shapes.
void run_now(Call& call, Stack* stack, const std::optional<std::string>& key) {
  auto stream = current_stream(call.device);
  auto name = c10::toString(call.schema.operator_name());
  call.prepare();
  count("kernels_waited_for");
  Stack work = call.on_cpu;
  run_and_wait(stream, name.c_str(), [&] { run_on_cpu(call.op, work); }, call.accesses);
  raise_late_error();
  auto learned = std::make_shared<Known>();
  bool plain = true;
  std::vector<std::vector<at::Tensor>> fresh;
  auto results = std::make_shared<Stack>(std::move(work));
  auto targets = std::make_shared<std::vector<std::pair<at::Tensor, Target>>>();
  std::vector<Access> stores;
  Stack values;  // results that are no tensors
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    auto& result = call.schema.returns()[i];
    bool tensors = result.type()->kind() == c10::TypeKind::TensorType ||
        result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) plain = false;
    if (!returns_fresh(result)) continue;
    fresh.emplace_back();
    learned->fresh.emplace_back();
    for (auto& found : tensors_of((*results)[i])) {
      auto shape = shape_of(found);
      auto made = make(call.device, shape);
      auto target = target_of(made);
      if (made.defined()) stores.push_back(access_of(made, true));
      targets->emplace_back(found, target);
      fresh.back().push_back(made);
      learned->fresh.back().push_back(std::move(shape));
    }
  }
  for (size_t i = 0; i < call.written.size(); ++i) {
    auto &device = call.written[i], &alias = call.written_alias[i];
    learned->written.push_back(shape_of(alias));
    bool moved = alias.storage().data() != device.storage().data();
    if (device.sizes() == alias.sizes() && device.strides() == alias.strides() && !moved) continue;
    if (call.lists_written) plain = false;
    at::native::resize_(device, alias.sizes(), std::nullopt);
    device.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    if (moved) {
      auto target = target_of(device);
      target.data += device.storage_offset() * device.element_size();
      stores.push_back(access_of(device, true));
      targets->emplace_back(alias, target);
    }
  }
  if (!targets->empty())
    enqueue(stream, Kind::free, name.c_str(),  // no delay of its own
        [targets, results] {
          for (auto& [found, target] : *targets) store(found, target);
        },
        std::move(stores));
  size_t next = 0;
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    auto& result = call.schema.returns()[i];
    if (returns_fresh(result)) {
      stack->push_back(pack(result, fresh.at(next++)));
    } else if (result.alias_info()) {
      stack->push_back(returned_argument(call, result));
    } else {
      stack->push_back((*results)[i]);
    }
  }
  if (plain && key) {
    std::lock_guard<std::mutex> lock(g_known_mutex);
    known_calls()[*key] = learned;
  }
}

void run_late(Call& call, Stack* stack, const Known& known) {
  auto stream = current_stream(call.device);
  size_t next_written = 0;
  for (size_t i = 0; i < call.given.size(); ++i) {  // an empty `out` gets its size before the kernel
    if (!call.writes[i] || !call.given[i].isTensor() || !is_simulated(call.given[i].toTensor())) continue;
    auto& shape = known.written.at(next_written++);
    const auto& device = call.given[i].toTensor();
    if (device.sizes() == shape.sizes && device.strides() == shape.strides) continue;
    at::native::resize_(device, shape.sizes, std::nullopt);
    device.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  }
  call.prepare();
  std::vector<std::vector<at::Tensor>> fresh;
  auto targets = std::make_shared<std::vector<std::vector<Target>>>();
  for (auto& shapes : known.fresh) {
    fresh.emplace_back();
    targets->emplace_back();
    for (auto& shape : shapes) {
      auto made = make(call.device, shape);
      if (made.defined()) call.accesses.push_back(access_of(made, true));
      targets->back().push_back(target_of(made));
      fresh.back().push_back(std::move(made));
    }
  }
  auto name = c10::toString(call.schema.operator_name());
  auto work = std::make_shared<Stack>(std::move(call.on_cpu));
  enqueue(stream, Kind::kernel, name.c_str(),
      [op = call.op, work, targets] {
        run_on_cpu(op, *work);
        size_t next = 0;
        for (size_t i = 0; i < op.schema().returns().size(); ++i) {
          if (!returns_fresh(op.schema().returns()[i])) continue;
          auto found = tensors_of((*work)[i]);
          auto& wanted = (*targets)[next++];
          TORCH_CHECK(found.size() == wanted.size(), op.schema().operator_name(), ": another number of results");
          for (size_t j = 0; j < found.size(); ++j) {
            TORCH_CHECK(
                shape_of(found[j]) == wanted[j].shape, op.schema().operator_name(),
                ": a result's shape depends on values");
            store(found[j], wanted[j]);
          }
        }
      },
      std::move(call.accesses));
  push_results(call, stack, fresh);
}

// A view: the CPU's kernel says what it looks like.
void run_view(Call& call, Stack* stack) {
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> aliases;
  Stack work;
  for (auto& value : call.given) {
    if (value.isTensor() && is_simulated(value.toTensor())) {
      sources.push_back(value.toTensor());
      aliases.push_back(call.aliases.of(value.toTensor()));
      work.emplace_back(aliases.back());
    } else {
      work.push_back(value);
    }
  }
  run_on_cpu(call.op, work);
  auto back = [&](const at::Tensor& found) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (!found.storage().is_alias_of(aliases[i].storage())) continue;
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(sources[i].storage()), sources[i].key_set(), found.dtype());
      made.unsafeGetTensorImpl()->set_storage_offset(found.storage_offset());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides());
      return made;
    }
    TORCH_CHECK(false, "simdev: ", call.schema.operator_name(), " is a view of nothing");
  };
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    if (work[i].isTensorList()) {
      std::vector<at::Tensor> made;
      for (auto& found : work[i].toTensorVector()) made.push_back(back(found));
      stack->emplace_back(std::move(made));
    } else {
      stack->emplace_back(back(work[i].toTensor()));
    }
  }
}

bool takes_host_indices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
      name.rfind("aten::_unsafe_index", 0) == 0 || name.rfind("aten::_fused_", 0) == 0 ||
      name.rfind("aten::_amp_", 0) == 0 || name.rfind("aten::_pack_padded", 0) == 0;
}

}  // namespace

void run(const c10::OperatorHandle& op, Stack* stack) {
  size_t count_of = op.schema().arguments().size();
  auto first = stack->end() - static_cast<std::ptrdiff_t>(count_of);
  Stack arguments(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
  stack->erase(first, stack->end());
  Call call(op, std::move(arguments));
  const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(call.device)));
  for (auto& result : call.schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return run_view(call, stack);
  TORCH_CHECK(
      !call.foreign || takes_host_indices(op.schema().name()),
      "Expected all tensors to be on the same device, but found at least two devices, simdev and cpu! (when checking "
      "an argument of ",
      op.schema().operator_name(), ")");
  bool waits = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  if (waits && op.schema().name() == "aten::index") waits = call.has_masks();
  auto key = waits ? std::nullopt : call.key();
  std::shared_ptr<const Known> known;
  if (key) {
    std::lock_guard<std::mutex> lock(g_known_mutex);
    auto found = known_calls().find(*key);
    if (found != known_calls().end()) known = found->second;
  }
  known ? run_late(call, stack, *known) : run_now(call, stack, key);
}

void register_cpu_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (full == "native_dropout" || full.rfind("set_", 0) == 0) continue;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

}  // namespace simdev
