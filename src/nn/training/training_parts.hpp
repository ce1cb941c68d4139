#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <lockstep/group.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <source_location>
#include <span>
#include <string>

namespace lockstep::nn {

/// What an archive has beside the parts.
using WriteMore = std::function<void(torch::serialize::OutputArchive&)>;
using ReadMore = std::function<void(torch::serialize::InputArchive&)>;

/// The parts as save_training writes them, without a checksum.
std::string parts_in_memory(std::span<const TrainingPart> parts, const WriteMore& more = {});

/// Loads the parts from what parts_in_memory returned, maybe on another rank. Throws, also what
/// `more` throws, and then no part is changed.
void load_parts(const std::string& bytes, std::span<const TrainingPart> parts,
                const ReadMore& more = {});

/// Implements save_training; `operation`: the name in errors.
void save_parts(const char* operation, const std::string& path, std::span<const TrainingPart> parts,
                const WriteMore& more, const Group& group, std::source_location where);

/// "'0.weight' of part 1".
std::string name_of_parameter(const at::Tensor& parameter, std::span<const TrainingPart> parts);

}  // namespace lockstep::nn
