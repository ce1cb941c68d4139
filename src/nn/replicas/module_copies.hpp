#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <lockstep/error.hpp>
#include <memory>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::nn::detail {

/// The copies of a module, which share its memory where they can.
class ModuleCopies {
 public:
  using ModulePtr = std::shared_ptr<torch::nn::Module>;
  /// devices: of a DataParallel, whose gradients flow into the module's, and whose first copy has
  /// the module's buffers. shards: parameters are leaves, on the CPU, and buffers each copy's own.
  enum class Of { devices, shards };

  /// devices: of the copies; of shards none are needed.
  ModuleCopies(ModulePtr module, std::vector<at::Device> devices, std::source_location where,
               Of of = Of::devices)
      : module_(std::move(module)), devices_(std::move(devices)), where_(where), of_(of) {}

  /// Makes n copies that match the module as it is now.
  void prepare(std::size_t n);
  const ModulePtr& operator[](std::size_t i) const { return copies_[i].module; }
  const at::Tensor& parameter(std::size_t i, std::size_t k) const {
    return copies_[i].parameters[k];
  }
  /// Discards the copies.
  void clear() { copies_.clear(); }

 private:
  /// In the name of what makes the copies.
  UsageError error(const std::string& text) const {
    const char* const operation = of_ == Of::devices ? "DataParallel" : "DistributedDataParallel";
    return {{operation, "", -1, 0, where_}, text};
  }

  /// Detects whether a tensor has changed since its copies were linked.
  struct Identity {
    at::Tensor tensor;  ///< also keeps its address from being reused
    const void* data;
    at::ScalarType type;
    bool requires_grad;

    explicit Identity(const at::Tensor& of)
        : tensor(of),
          data(of.data_ptr()),
          type(of.scalar_type()),
          requires_grad(of.requires_grad()) {}
    bool operator==(const Identity& other) const {
      return tensor.is_same(other.tensor) && data == other.data && type == other.type &&
             requires_grad == other.requires_grad && tensor.sizes() == other.tensor.sizes();
    }
  };

  struct Copy {
    ModulePtr module;
    std::vector<ModulePtr> modules;
    std::vector<at::Tensor> parameters, buffers;
    std::vector<at::Tensor*> members;  ///< see members_
  };

  void check_copy(const torch::nn::Module& original, const ModulePtr& copy,
                  const std::string& name) const;
  Copy make_copy(const std::vector<ModulePtr>& modules, const std::vector<Identity>& parameters,
                 const std::vector<Identity>& buffers) const;

  void tie_members(const Copy& copy, const std::vector<Identity>& parameters,
                   const std::vector<Identity>& buffers, const at::Device& device) const;

  ModulePtr module_;
  std::vector<at::Device> devices_;
  std::source_location where_;
  Of of_;
  std::vector<ModulePtr> modules_;
  std::vector<Identity> parameters_, buffers_;
  /// The tensors with which the layers of modules_ compute, which need not be those that they have
  /// registered: a program may tie them (head->weight = embedding->weight).
  std::vector<at::Tensor*> members_;
  std::vector<Copy> copies_;
};

}  // namespace lockstep::nn::detail
