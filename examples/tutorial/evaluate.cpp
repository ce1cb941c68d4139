// Scores 10 images with every rank's help; rank 0 prints the results.
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/lockstep.hpp>

struct Settings {
  int n_images = 0;
  double threshold = 0;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(n_images, threshold);
  }
};

// [object]
struct Result {
  int image = 0;
  double score = 0;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(image, score);
  }
};
// [object]

// Stands for a model.
double score_of(int image) { return image * 7 % 10 / 10.0; }

int main() {
  lockstep::init_dist();
  const auto [rank, n_ranks] = lockstep::get_dist_info();

  // [broadcast]
  Settings settings;
  if (rank == 0) settings = {10, 0.45};  // from a file, or the command line
  lockstep::broadcast_object(settings);
  // [broadcast]

  // [share]
  std::vector<Result> results;
  for (int image = rank; image < settings.n_images; image += n_ranks) {
    results.push_back({image, score_of(image)});
  }
  // [share]

  // [gather]
  std::vector<double> scores;
  for (const Result& result : results) scores.push_back(result.score);
  const auto by_rank = lockstep::gather(scores);  // on rank 0: a vector per rank; else empty
  for (std::size_t from = 0; from < by_rank.size(); ++from) {
    std::printf("rank %zu scored %zu images\n", from, by_rank[from].size());
  }
  // [gather]

  // [metrics]
  std::map<std::string, double> counts = {{"images", 0}, {"hits", 0}};
  for (const Result& result : results) {
    counts["images"] += 1;
    counts["hits"] += result.score > settings.threshold ? 1 : 0;
  }
  lockstep::all_reduce_dict(counts);
  if (rank == 0) std::printf("%g hits in %g images\n", counts["hits"], counts["images"]);
  // [metrics]

  // [collect]
  const auto all = lockstep::collect_results(results, static_cast<std::size_t>(settings.n_images));
  if (all) {  // on rank 0, in the order of the images
    for (const Result& result : *all) std::printf("image %d: %g\n", result.image, result.score);
  }
  // [collect]
}
