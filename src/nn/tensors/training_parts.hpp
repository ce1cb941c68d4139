#pragma once

#include <lockstep/nn/checkpoint.hpp>
#include <span>
#include <string>

namespace lockstep::nn {

/// The parts as save_training writes them, without a checksum.
std::string parts_in_memory(std::span<const TrainingPart> parts);

/// Loads the parts from what parts_in_memory returned, maybe on another rank. Throws, and then no
/// part is changed.
void load_parts(const std::string& bytes, std::span<const TrainingPart> parts);

}  // namespace lockstep::nn
