// Objects: structs, standard containers and JSON, and a section that rank 0 runs first.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <lockstep/lockstep.hpp>

struct Detection {
  std::string image;
  std::vector<float> box;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(image, box);
  }
};

int main() {
  lockstep::init_dist();
  const int rank = lockstep::get_rank();

  nlohmann::json settings;
  if (rank == 0) settings = {{"model", "resnet18"}, {"rate", 0.1}};
  lockstep::broadcast_object(settings);

  // Rank 0 downloads, say; the others then find the file.
  const auto folder = lockstep::main_process_first([] { return std::string("data"); });

  const std::vector<float> box(static_cast<std::size_t>(rank), 0.5F);
  const Detection mine{.image = folder + "/" + std::to_string(rank) + ".png", .box = box};
  const std::vector<Detection> all = lockstep::all_gather_object(mine);

  std::printf("rank %d: %s, %zu detections, the last in %s\n", rank,
              settings["model"].get<std::string>().c_str(), all.size(), all.back().image.c_str());
}
