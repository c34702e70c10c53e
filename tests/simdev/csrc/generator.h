// Random numbers as a GPU draws them: the state is a seed and an offset; each kernel draws from a part of its own, so
// nothing has to wait.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "streams.h"

namespace simdev {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t value) override { seed_ = value, offset_ = 0; }
  void set_offset(uint64_t value) override { offset_ = value; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "simdev: a state is 16 bytes");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  // Returns what one kernel draws from.
  at::Generator part() {
    uint64_t mixed = seed_ * 0x9e3779b97f4a7c15ULL + (offset_ += 4);
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? static_cast<c10::DeviceIndex>(current_device()) : device);
}

const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace simdev
