#pragma once

/// The whole core. The libtorch layer is <lockstep/nn.hpp>.
#include <lockstep/dist.hpp>
#include <lockstep/elastic.hpp>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/main_process.hpp>
#include <lockstep/objects.hpp>
#include <lockstep/sync_master.hpp>
#include <lockstep/trace.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>
