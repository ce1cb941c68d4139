// The compiler's errors for likely mistakes: one sentence with the remedy, near the top, and with
// the caller's line. One run of the compiler for all snippets; `#line` tells them apart.

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "support/temporary_folder.hpp"

namespace lockstep {
namespace diagnostics_test {
namespace {

struct Snippet {
  const char* code;  ///< of a function body; no two instantiate the same template alike
  const char* sentence;
};

struct Header {
  const char* path;
  const char* text;
};

/// As those of libtorch, as far as lockstep's headers look at them.
constexpr Header kHeaders[] = {
    {"ATen/core/Tensor.h", R"(
namespace at {
struct Tensor {
  int scalar_type() const;
  int* sizes() const;
  bool is_contiguous() const;
  const Tensor& grad() const;
  Tensor operator[](int) const;
};
}
)"},
    {"torch/serialize/archive.h", R"(
namespace c10 {
struct IValue {
  IValue() = default;
  explicit IValue(long);
  long toInt() const;
};
}
namespace torch::serialize {
struct OutputArchive {
  void write(const char*, const c10::IValue&);
};
struct InputArchive {
  void read(const char*, c10::IValue&);
};
}
)"},
    {"torch/nn/module.h",
     "#include <torch/serialize/archive.h>\n"
     R"(
namespace torch::nn {
struct Module {
  void save(serialize::OutputArchive&) const;
  void load(serialize::InputArchive&);
};
}
)"},
    {"torch/optim/optimizer.h", "namespace torch::optim { struct Optimizer {}; }\n"},
    {"torch/optim/schedulers/lr_scheduler.h", R"(
namespace torch::optim { struct LRScheduler { unsigned step_count_; }; }
)"},
};

constexpr const char* kPrelude = R"(
#include <lockstep/lockstep.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <complex>
#include <deque>
using namespace lockstep;
using namespace std::chrono_literals;
extern at::Tensor tensor;
struct Plain { int x; };
struct NoDefault { explicit NoDefault(int); };
enum class Color { red };
extern Group group;
extern std::vector<float> v;
)";

constexpr Snippet kSnippets[] = {
    // types of elements
    {"std::vector<long double> d; all_reduce(d);", "elements are bool, integers of 8 to 64 bits"},
    {"std::vector<std::complex<float>> d; broadcast(d);", "elements are bool, integers"},
    {"std::array<Color, 2> d{}; all_reduce(d);", "elements are bool, integers"},
    {"std::vector<Plain> d; all_gather(d);", "all_gather_object"},
    {"all_gather(std::vector<std::string>{\"a\"});", "all_gather_object"},
    {"std::vector<std::vector<float>> d; all_reduce(d);", "elements are bool, integers"},
    {"std::vector<bool> d; broadcast(d);", "std::vector<bool> packs its elements into bits"},
    {"std::deque<int> d; all_reduce(d);", "pass contiguous numbers"},
    {"static_cast<void>(all_reduce_value(1.0L));", "a value is a bool, an integer of 8 to 64 bits"},
    {"static_cast<void>(all_reduce_value(Color::red));", "static_cast to one of them"},
    {"static_cast<void>(all_reduce_value(v));", "for several use all_reduce"},
    // no range
    {"float x = 1; all_reduce(x);", "a single number is not a range"},
    {"int x = 1; broadcast(x, 0);", "value = all_reduce_value(value)"},
    {"send(3, 0);", "pass std::span(&value, 1) or a std::array"},
    {"float* p = nullptr; all_reduce(p);", "a pointer has no length: pass std::span"},
    {"double* p = nullptr; all_reduce(p, 5);", "such as std::span(pointer, size)"},
    {"int* p = nullptr; send(p, 1);", "a pointer has no length"},
    {"Plain p{}; broadcast(p);", "broadcast_object"},
    {"all_reduce(group);", "pass contiguous numbers"},
    // tensors
    {"at::Tensor t; all_reduce(t);", "call the function of the same name in lockstep::nn"},
    {"std::vector<at::Tensor> t; all_reduce(t);",
     "tensors are for the functions of <lockstep/nn.hpp>"},
    {"at::Tensor t; static_cast<void>(all_gather(t));", "lockstep::nn"},
    {"at::Tensor t; static_cast<void>(all_gather_object(t));",
     "tensors are sent by the functions of"},
    {"at::Tensor t; static_cast<void>(all_reduce_value(t));", "lockstep::nn::all_reduce"},
    // results that no one could see
    {"const std::vector<float> d(1); all_reduce(d);", "pass a named object that is not const"},
    {"all_reduce(std::vector<float>{1, 2});", "pass a named object that is not const"},
    {"recv(std::array<int, 2>{}, 1);", "pass a named object that is not const"},
    {"const std::array<int, 2> d{}; all_gather(v, d);", "pass a named object that is not const"},
    {"nn::all_reduce(tensor.grad());", "pass a named at::Tensor that is not const"},
    {"nn::broadcast(tensor[0], 0, group);", "pass a named at::Tensor that is not const"},
    {"static_cast<void>(send_async(std::vector<double>(3), 1));",
     "reads the data until Work::wait returns"},
    {"static_cast<void>(all_reduce_async(std::vector<double>(3)));",
     "pass a named object that is not const"},
    {"static_cast<void>(Group().allocate(64).as<float>());", "store the SharedBuffer"},
    // order of arguments
    {"all_reduce(v, group);", "the arguments are (data, op, group, timeout)"},
    {"all_reduce(v, \"sum\");", "op is a ReduceOp"},
    {"all_reduce(v, std::string(\"mean\"));", "parse_reduce_op(text)"},
    {"all_reduce(v, 5s);", "the arguments are (data, op, group, timeout)"},
    {"std::vector<float> out; all_reduce(v, out);", "which is reduced in place"},
    {"static_cast<void>(all_reduce_value(1, group));",
     "the arguments are (data, op, group, timeout)"},
    {"all_reduce(v, 0);", "op is a ReduceOp"},
    {"double w[2]{}; all_reduce(w, {.op = \"sum\"});", "parse_reduce_op(text)"},
    {"double w[3]{}; all_reduce(w, {.timeout = 5});", "timeout is a duration, such as 5s"},
    {"double w[4]{}; all_reduce(w, {.op = 1, .group = group});", "op is a ReduceOp"},
    {"double w[5]{}; reduce(w, 0, {.timeout = 5});", "timeout is a duration"},
    {"double w[9]{}; reduce(w, 0, group);", "reduce dst after data"},
    {"static_cast<void>(all_reduce_value(1L, {.op = 3}));", "op is a ReduceOp"},
    {"double w[6]{}; static_cast<void>(all_reduce_async(w, {.timeout = 5}));",
     "timeout is a duration"},
    {"nn::all_reduce(std::move(tensor.grad()), {.op = ReduceOp::mean});",
     "pass a named at::Tensor that is not const"},
    // members of Group
    {"double w[10]{}; group.all_reduce(w, 5s);", "a member of Group takes (data, op, timeout)"},
    {"double w[7]{}; group.all_reduce(w, {.op = ReduceOp::max});",
     "a member of Group takes (data, op, timeout)"},
    {"double w[8]{}; group.all_reduce(w, group);", "a member of Group takes (data, op, timeout)"},
    {"static_cast<void>(group.all_reduce_value(1U, 5s));", "op is a ReduceOp"},
    {"std::vector<std::complex<double>> d; group.all_reduce(d);", "elements are bool, integers"},
    {"short x = 1; group.broadcast(x);", "a single number is not a range"},
    {"short* p = nullptr; group.send(p, 1);", "a pointer has no length"},
    {"const std::vector<short> d(1); group.all_reduce(d);",
     "pass a named object that is not const"},
    {"static_cast<void>(group.send_async(std::vector<short>(3), 1));",
     "reads the data until Work::wait returns"},
    {"at::Tensor t; static_cast<void>(group.send_async(t, 1));",
     "call the function of the same name in lockstep::nn"},
    // objects
    {"static_cast<void>(all_gather_object(\"text\"));", "pass a std::string"},
    {"std::vector<std::string> all = all_gather_object(\"texts\");", "pass a std::string"},
    {"auto all = gather_object(\"a text\");", "pass a std::string"},
    {"Plain p{}; static_cast<void>(all_gather_object(p));", "void serialize(A& archive)"},
    {"const int* p = nullptr; static_cast<void>(all_gather_object(p));", "or what it points to"},
    {"NoDefault n(1); broadcast_object(n);", "give it a default constructor"},
    // parts of a training
    {"at::Tensor t; nn::ElasticState state{t};", "Give the module of a tensor"},
    {"Plain p{}; nn::save_training(\"file\", {p});",
     "save(OutputArchive&) and load(InputArchive&)"},
    {"at::Tensor t; nn::assert_in_sync(t);", "lockstep: expected a module"},
};

struct Output {
  int status = -1;
  std::vector<std::string> lines;
};

Output compile(const std::filesystem::path& file) {
  const std::string command = fmt::format(
      "LC_ALL=C {} -std=c++20 -fsyntax-only -fmax-errors=0 -fdiagnostics-color=never {} -I'{}' "
      "'{}' 2>&1",
      LOCKSTEP_CXX_COMPILER, LOCKSTEP_CXX_INCLUDES, file.parent_path().string(), file.string());
  Output output;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> text{};
  std::string line;
  while (std::fgets(text.data(), text.size(), pipe) != nullptr) {
    line += text.data();
    if (line.back() != '\n') continue;
    line.pop_back();
    output.lines.push_back(std::move(line));
    line.clear();
  }
  output.status = ::pclose(pipe);
  return output;
}

class DiagnosticsTest : public testing::Test {
 protected:
  void SetUp() override {
#if !defined(__GNUC__) || defined(__clang__)
    GTEST_SKIP() << "reads GCC's messages";
#endif
    for (const Header& header : kHeaders) {
      std::filesystem::create_directories((dir_ / header.path).parent_path());
      std::ofstream(dir_ / header.path) << "#pragma once\n" << header.text;
    }
  }

  const test::TemporaryFolder folder_;
  const std::filesystem::path dir_ = folder_.path();
};

/// An instantiation's trail stands before its error, so an error begins at the first line after the
/// one before it, and ends with its notes.
TEST_F(DiagnosticsTest, mistakes_give_one_sentence) {
  const auto file = dir_ / "snippets.cpp";
  std::ofstream source(file);
  source << kPrelude;
  for (std::size_t i = 0; i < std::size(kSnippets); ++i) {
    source << fmt::format("#line 1 \"snippet_{}_\"\nvoid f{}() {{ {} }}\n", i, i,
                          kSnippets[i].code);
  }
  source.close();
  const Output output = compile(file);
  ASSERT_NE(output.status, 0);

  struct Answer {
    std::string text;
    int n_lines = 0;
    bool is_complete = false;
  };
  std::map<std::size_t, Answer> answers;
  std::vector<std::string> block;
  const auto finish_block = [&] {
    std::size_t snippet = std::size(kSnippets);
    bool has_error = false;
    for (const std::string& line : block) {
      has_error = has_error || line.find("error: ") != std::string::npos;
      unsigned number = 0;
      const auto at = line.find("snippet_");
      if (at != std::string::npos && std::sscanf(line.c_str() + at, "snippet_%u_", &number) == 1) {
        snippet = std::min<std::size_t>(snippet, number);
      }
    }
    if (has_error && snippet < std::size(kSnippets) && !answers.contains(snippet)) {
      Answer answer;
      for (const std::string& line : block) answer.text += line + '\n';
      answer.n_lines = static_cast<int>(block.size());
      answers.emplace(snippet, std::move(answer));
    }
    block.clear();
  };
  bool had_error = false;
  for (const std::string& line : output.lines) {
    const bool begins = line.find("In file included from") == 0 ||
                        line.find(": In ") != std::string::npos ||
                        (had_error && line.find("error: ") != std::string::npos);
    if (begins && had_error) {
      finish_block();
      had_error = false;
    }
    had_error = had_error || line.find("error: ") != std::string::npos;
    if (line.find("In file included from") == 0 || line.find("                 from") == 0) {
      continue;  // the umbrella's own includes
    }
    block.push_back(line);
  }
  finish_block();

  for (std::size_t i = 0; i < std::size(kSnippets); ++i) {
    const auto answer = answers.find(i);
    if (answer == answers.end()) {
      ADD_FAILURE() << "no error: " << kSnippets[i].code;
      continue;
    }
    EXPECT_NE(answer->second.text.find(kSnippets[i].sentence), std::string::npos)
        << kSnippets[i].code << "\nsaid:\n"
        << answer->second.text;
    EXPECT_LT(answer->second.n_lines, 12) << kSnippets[i].code << "\nsaid:\n"
                                          << answer->second.text;
  }
}

TEST_F(DiagnosticsTest, valid_code_compiles) {
  const auto file = dir_ / "right.cpp";
  std::ofstream(file) << kPrelude << R"(
void f() {
  float* p = nullptr;
  std::array<bool, 3> flags{};
  std::unordered_map<std::string, double> dict;
  SharedBuffer buffer = group.allocate(64);
  all_reduce(std::span(p, 5));
  all_reduce(buffer.as<float>(), ReduceOp::mean, group, 5s);
  broadcast(flags, 0, group, std::chrono::duration<double>(0.5));
  all_reduce_value(std::size_t{1});
  all_reduce_dict(dict);
  barrier(group, 5s);
  const std::vector<unsigned> mine(3);
  std::vector<unsigned> all(6);
  all_gather(mine, all);
  std::vector<std::vector<unsigned>> parts = all_gather(mine, group);
  std::vector<std::string> names = all_gather(std::string("rank 0"), group);
  at::Tensor gradient = tensor.grad();
  nn::all_reduce(gradient, ReduceOp::sum, group, 5s);
  nn::send(tensor[0], 1);
  Work work = all_gather_async(mine, all, group);
  work.wait();
  torch::nn::Module module;
  torch::optim::Optimizer optimizer;
  double rate = 1;
  const auto owned = std::make_shared<torch::nn::Module>();
  nn::ElasticState state{owned, module, optimizer, rate};
  nn::assert_in_sync(&module, optimizer, group);
  send(std::vector<int>{1}, 1);
  reduce_scatter_async(all, std::span(all).first(3)).wait();
  all_reduce(v, {.op = ReduceOp::mean, .group = group, .timeout = 5s});
  all_reduce(v, {});
  CallOptions options{.group = group};
  all_reduce(v, options);
  reduce(v, 0, {.timeout = 5s});
  reduce_scatter(mine, std::span(all).first(1), {.op = ReduceOp::max});
  nn::all_reduce(gradient, {.op = ReduceOp::mean});
  nn::all_reduce(gradient, options);
  group.all_reduce(v, ReduceOp::max, 5s);
  group.all_reduce({p, 5, DType::f32});
  parts = group.all_gather(mine);
  group.all_gather(mine, all, 5s);
  group.send(std::vector<int>{1}, 1);
}
)";
  const Output output = compile(file);
  EXPECT_EQ(output.status, 0);
  for (const std::string& line : output.lines) ADD_FAILURE() << line;
}

TEST_F(DiagnosticsTest, former_names_say_the_present_one) {
  const auto file = dir_ / "former.cpp";
  std::ofstream(file)
      << "#include <lockstep/lockstep.hpp>\n#include <lockstep/launch.hpp>\n"
         "#include <lockstep/control.hpp>\n#include <lockstep/sync.hpp>\n"
         "bool f() { lockstep::count_step(); return lockstep::replacements_wait(); }\n";
  const Output output = compile(file);
  EXPECT_EQ(output.status, 0);
  std::string text;
  for (const std::string& line : output.lines) text += line + '\n';
  EXPECT_NE(text.find("is deprecated: use step_done"), std::string::npos) << text;
  EXPECT_NE(text.find("is deprecated: use has_waiting_replacements"), std::string::npos) << text;
  for (const char* header : {"world.hpp", "main_process.hpp", "sync_master.hpp"}) {
    EXPECT_NE(text.find("is deprecated: include lockstep/" + std::string(header)),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace diagnostics_test
}  // namespace lockstep
