#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::on_ranks;

TEST(TensorOpsTest, all_reduce_every_type) {
  on_ranks(3, [](int rank) {
    for (const auto type : {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                            at::kFloat, at::kDouble}) {
      Tensor data = at::full({2, 3}, rank + 1, type);
      all_reduce(data);
      EXPECT_TRUE(data.eq(6).all().item<bool>()) << data;
      all_reduce(data, ReduceOp::mean);
      EXPECT_TRUE(data.eq(6).all().item<bool>()) << data;
    }
  });
}

TEST(TensorOpsTest, arguments_by_name) {
  on_ranks(3, [](int rank) {
    const Group pair = default_group().split(rank == 0 ? 0 : 1);  // of ranks 1 and 2
    const CallOptions options{.op = ReduceOp::max, .group = pair};
    const auto expect_max = [&](const Tensor& result) {
      EXPECT_EQ(result.item<int>(), rank == 0 ? 0 : 2);
    };
    const Tensor own = at::full({1}, rank);
    const auto change = [&](const auto& call) {
      Tensor data = own.clone();
      call(data);
      return data;
    };
    expect_max(change([&](Tensor& data) { all_reduce(data, options); }));
    expect_max(change([&](Tensor& data) { all_reduce_async(data, options).wait(); }));
    const auto expect_max_on_dst = [&](const Tensor& result) {
      EXPECT_EQ(result.item<int>(), rank == 0 ? 0 : pair.rank() == 1 ? 2 : rank);
    };
    const int dst = pair.size() - 1;
    expect_max_on_dst(change([&](Tensor& data) { reduce(data, dst, options); }));
    expect_max_on_dst(change([&](Tensor& data) { reduce_async(data, dst, options).wait(); }));
    const std::vector<Tensor> parts(static_cast<std::size_t>(pair.size()), own);
    expect_max(change([&](Tensor& data) { reduce_scatter(data, parts, options); }));
    expect_max(change([&](Tensor& data) { reduce_scatter_async(data, parts, options).wait(); }));

    std::vector<Tensor> list{own.clone()};
    all_reduce(list, options);
    expect_max(list[0]);
    list = {own.clone()};
    reduce(list, dst, options);
    expect_max_on_dst(list[0]);
    list = {own.clone()};
    reduce_scatter(list, std::vector<std::vector<Tensor>>(parts.size(), {own}), options);
    expect_max(list[0]);
    list = {own.clone()};
    all_reduce_params(list, /*coalesce=*/true, /*bucket_size_mb=*/-1, options);
    expect_max(list[0]);
    std::map<std::string, Tensor> dict{{"a", own.clone()}};
    all_reduce_dict(dict, options);
    expect_max(dict["a"]);

    const CallOptions sum{.group = pair};
    const Tensor wide = own.to(at::kFloat);
    const float total = rank == 0 ? 0 : 3;
    EXPECT_EQ(functional::all_reduce(wide, sum).item<float>(), total);
    EXPECT_EQ(
        functional::reduce_scatter(std::vector<Tensor>(parts.size(), wide), sum).item<float>(),
        total);
    EXPECT_EQ(functional::reduce(wide, dst, sum).item<float>(), pair.rank() == dst ? total : 0);
  });
}

TEST(TensorOpsTest, strided_tensors_are_filled_in_place) {
  on_ranks(2, [](int rank) {
    const Tensor whole = at::zeros({3, 4});
    Tensor column = whole.select(1, 2);
    column.fill_(rank + 1);
    all_reduce(column);
    EXPECT_TRUE(whole.select(1, 2).eq(3).all().item<bool>());
    EXPECT_EQ(whole.sum().item<float>(), 9);
    column.fill_(rank);
    broadcast(column, /*src=*/1);
    EXPECT_EQ(whole.sum().item<float>(), 3);
  });
}

TEST(TensorOpsTest, all_gather_by_rank_and_broadcast_of_any_type) {
  on_ranks(3, [](int rank) {
    const auto all = all_gather(at::full({2, 1}, rank, at::kLong));
    ASSERT_EQ(all.size(), 3U);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(all[static_cast<std::size_t>(r)].sizes(), (std::vector<std::int64_t>{2, 1}));
      EXPECT_TRUE(all[static_cast<std::size_t>(r)].eq(r).all().item<bool>());
    }
    Tensor flags = at::full({3}, rank == 2, at::kBool);
    broadcast(flags, /*src=*/2);
    EXPECT_TRUE(flags.all().item<bool>());
    EXPECT_EQ(all_gather(flags)[0].scalar_type(), at::kBool);
    Tensor scalar = at::ones({});
    all_reduce(scalar);
    EXPECT_EQ(scalar.item<float>(), 3);
    Tensor empty = at::ones({0, 2});
    all_reduce(empty);
  });
}

TEST(TensorOpsTest, what_cannot_be_sent_is_rejected) {
  Tensor flags = at::ones({2}, at::kBool), undefined, sparse = at::eye(2).to_sparse();
  EXPECT_THROW(all_reduce(flags), UsageError);
  EXPECT_THROW(all_reduce(undefined), UsageError);
  EXPECT_THROW(all_reduce(sparse), UsageError);
  EXPECT_THROW(broadcast(undefined), UsageError);
  Tensor quantized = at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8);
  test::expect_contains(test::thrown<UsageError>([&] { broadcast(quantized); }), "dequantize()");
  EXPECT_THROW(elements_of(at::ones({2, 2}).t().select(0, 0)), UsageError);
}

/// Before anything is sent: some ranks' tensors may be right.
TEST(TensorOpsTest, a_result_cannot_go_into_an_expanded_tensor) {
  Tensor expanded = at::ones({1, 3}).expand({2, 3}), like = at::ones({2, 3});
  const std::vector<std::pair<std::string, std::function<void()>>> operations{
      {"all_reduce", [&] { all_reduce(expanded); }},
      {"reduce", [&] { reduce(expanded); }},
      {"broadcast", [&] { broadcast(expanded); }},
      {"scatter", [&] { scatter(expanded, {like}); }},
      {"reduce_scatter", [&] { reduce_scatter(expanded, {like}); }},
      {"recv", [&] { recv(expanded, 0); }},
      {"all_reduce", [&] { all_reduce_async(expanded).wait(); }},
      {"reduce", [&] { reduce_async(expanded).wait(); }},
      {"broadcast", [&] { broadcast_async(expanded).wait(); }},
      {"scatter", [&] { scatter_async(expanded, {like}).wait(); }},
      {"reduce_scatter", [&] { reduce_scatter_async(expanded, {like}).wait(); }},
      {"recv", [&] { recv_async(expanded, 0).wait(); }},
      {"all_reduce_params",
       [&] {
         all_reduce_params({like, expanded});
       }},
      {"all_reduce_dict", [&] {
         std::map<std::string, Tensor> dict{{"a", like}, {"b", expanded}};
         all_reduce_dict(dict);
       }}};
  for (const auto& [name, call] : operations) {
    try {
      call();
      ADD_FAILURE() << name << ": no error";
    } catch (const UsageError& error) {
      EXPECT_EQ(error.context().operation, name);
      EXPECT_NE(error.text().find("is expanded"), std::string::npos) << name << error.text();
      EXPECT_NE(error.text().find("clone()"), std::string::npos) << name << error.text();
    } catch (const std::exception& error) {
      ADD_FAILURE() << name << ": " << error.what();
    }
  }
  EXPECT_EQ(all_gather(expanded)[0].numel(), 6) << "it may be sent";
}

/// The sum and the mean of complex numbers are those of their parts.
TEST(TensorOpsTest, complex_numbers_are_summed) {
  on_ranks(2, [](int rank) {
    for (const auto type : {at::kComplexFloat, at::kComplexDouble}) {
      const auto number = [&](double re, double im) {
        return at::complex(at::tensor({re}, at::kDouble), at::tensor({im}, at::kDouble)).to(type);
      };
      const Tensor mine = number(1 + rank, 10 * (1 + rank));
      Tensor sum = mine.clone(), mean = mine.clone(), column = mine.expand({2}).clone();
      all_reduce(sum);
      EXPECT_TRUE(sum.equal(number(3, 30))) << sum;
      all_reduce_async(mean, ReduceOp::mean).wait();
      EXPECT_TRUE(mean.equal(number(1.5, 15))) << mean;
      reduce_scatter(sum, {mine, 2 * mine});
      EXPECT_TRUE(sum.equal((1 + rank) * number(3, 30))) << sum;
      all_reduce_params({column});
      EXPECT_TRUE(column.equal(number(3, 30).expand({2}))) << column;
      Tensor conjugate = rank == 0 ? mine.clone().conj() : number(2, -20);
      all_reduce(conjugate);
      EXPECT_TRUE(conjugate.resolve_conj().equal(number(3, -30))) << conjugate;
    }
  });
}

TEST(TensorOpsTest, errors_name_the_operation_that_was_called) {
  Tensor complex = at::ones({2}, at::kComplexFloat);
  const std::vector<std::pair<std::string, std::function<void()>>> operations{
      {"all_reduce", [&] { all_reduce(complex, ReduceOp::max); }},
      {"reduce", [&] { reduce(complex, 0, ReduceOp::product); }},
      {"reduce_scatter", [&] { reduce_scatter(complex, {complex}, ReduceOp::min); }},
      {"all_reduce", [&] { all_reduce_async(complex, ReduceOp::max).wait(); }},
      {"all_reduce_params", [&] { all_reduce_params({complex}, true, -1, ReduceOp::max); }},
      {"all_reduce_dict", [&] {
         std::map<std::string, Tensor> dict{{"a", complex}};
         all_reduce_dict(dict, ReduceOp::max);
       }}};
  for (const auto& [name, call] : operations) {
    try {
      call();
      ADD_FAILURE() << name << ": no error";
    } catch (const UsageError& error) {
      EXPECT_EQ(error.context().operation, name);
      test::expect_contains(error.text(), "ComplexFloat");
    }
  }
}

TEST(TensorOpsTest, parameters_may_be_reduced_in_place) {
  on_ranks(2, [](int) {
    Tensor parameter = at::ones({2}).requires_grad_();
    all_reduce(parameter);
    EXPECT_TRUE(parameter.eq(2).all().item<bool>());
    EXPECT_TRUE(parameter.is_leaf());
  });
}

TEST(TensorOpsTest, every_other_operation) {
  on_ranks(3, [](int rank) {
    const auto mine = static_cast<std::size_t>(rank);
    Tensor data = at::full({2}, rank + 1.0);
    reduce(data, /*dst=*/1);
    EXPECT_EQ(data[0].item<double>(), rank == 1 ? 6 : rank + 1);
    const auto gathered = gather(at::full({2, 1}, rank, at::kBool), /*dst=*/2);
    EXPECT_EQ(gathered.size(), rank == 2 ? 3U : 0U);
    if (rank == 2) {
      EXPECT_TRUE(gathered[1].all().item<bool>());
    }

    std::vector<Tensor> parts;
    for (int r = 0; r < 3; ++r) parts.push_back(at::full({2, 2}, 10 * rank + r, at::kFloat));
    Tensor out = at::zeros({2, 2});
    scatter(out, rank == 1 ? parts : std::vector<Tensor>(), /*src=*/1);
    EXPECT_TRUE(out.eq(10 + rank).all().item<bool>());
    Tensor column = at::zeros({2, 2, 2}).select(2, 1);  // not contiguous
    reduce_scatter(column, parts);
    EXPECT_TRUE(column.eq(30 + 3 * rank).all().item<bool>());
    const auto swapped = all_to_all(parts);
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(swapped[r].eq(10 * static_cast<int>(r) + rank).all().item<bool>());
    }
    if (rank == 0) send(parts[2], /*dst=*/2);
    if (rank == 2) {
      recv(out, /*src=*/0);
      EXPECT_TRUE(out.eq(2).all().item<bool>());
    }
    EXPECT_THROW(reduce_scatter(out, {out}), UsageError);
    EXPECT_THROW(all_to_all({out, out, at::ones({1})}), UsageError);
    EXPECT_THROW(all_to_all({}), UsageError);
    EXPECT_LE(mine, 2U);
  });
}

/// What backward needs is the value before the call.
TEST(TensorOpsTest, a_result_in_saved_memory_is_seen_by_backward) {
  on_ranks(2, [](int rank) {
    const auto backward_after = [rank](const auto& communicate) {
      const Tensor mse = at::full({3}, rank + 1.0).requires_grad_();
      Tensor loss = mse.sqrt();  // saves its result
      communicate(loss);
      loss.sum().backward();
    };
    EXPECT_THROW(backward_after([](Tensor& x) { all_reduce(x, ReduceOp::mean); }), c10::Error);
    EXPECT_THROW(backward_after([](Tensor& x) { all_reduce_async(x).wait(); }), c10::Error);
    EXPECT_THROW(backward_after([](Tensor& x) { all_reduce_params({x}, /*coalesce=*/false); }),
                 c10::Error);
    const auto broadcast_it = [&] { backward_after([](Tensor& x) { broadcast(x); }); };
    const auto broadcast_later = [&] {
      backward_after([](Tensor& x) { broadcast_async(x).wait(); });
    };
    if (rank == 0) {  // whose data is sent
      EXPECT_NO_THROW(broadcast_it());
      EXPECT_NO_THROW(broadcast_later());
    } else {
      EXPECT_THROW(broadcast_it(), c10::Error);
      EXPECT_THROW(broadcast_later(), c10::Error);
    }
    EXPECT_NO_THROW(backward_after([](const Tensor& x) { all_gather(x); }));
  });
}

TEST(TensorOpsTest, inference_tensors_have_no_version) {
  on_ranks(2, [](int rank) {
    const auto make = [rank] {
      const c10::InferenceMode inference;
      return at::full({3}, rank + 1.0);
    };
    Tensor data = make();
    all_reduce(data);
    EXPECT_TRUE(data.eq(3).all().item<bool>());
  });
}

using Nested = std::map<std::string, std::tuple<std::vector<Tensor>, int, Tensor>>;
static_assert(TensorTree<Nested> && !TensorTree<Tensor> && !TensorTree<std::vector<int>>);
// Its order differs between ranks.
static_assert(!TensorTree<std::vector<std::unordered_map<std::string, Tensor>>>);

TEST(TensorTreesTest, nested_lists_and_dicts) {
  on_ranks(2, [](int rank) {
    const auto make = [&] {
      return Nested{{"a", {{at::full({2}, rank), at::full({1}, 2 * rank)}, rank, at::ones({})}},
                    {"b", {{}, 7, at::full({3}, rank, at::kLong)}}};
    };
    Nested data = make();
    all_reduce(data);
    EXPECT_TRUE(std::get<0>(data["a"])[1].eq(2).all().item<bool>());
    EXPECT_EQ(std::get<2>(data["a"]).item<float>(), 2);
    EXPECT_EQ(std::get<1>(data["a"]), rank) << "not a tensor";
    const auto all = all_gather(make());
    ASSERT_EQ(all.size(), 2U);
    EXPECT_TRUE(std::get<2>(all[1].at("b")).eq(1).all().item<bool>());
    EXPECT_TRUE(std::get<2>(all[0].at("b")).eq(0).all().item<bool>());
    torch::OrderedDict<std::string, Tensor> dict;
    dict.insert("x", at::full({2}, rank));
    broadcast(dict, /*src=*/1);
    EXPECT_TRUE(dict["x"].eq(1).all().item<bool>());
  });
}

TEST(TensorTreesTest, every_other_operation) {
  on_ranks(3, [](int rank) {
    const auto make = [](int value) {
      return Nested{{"a", {{at::full({2}, value)}, value, at::full({1}, value, at::kLong)}}};
    };
    const auto expect = [](const Nested& data, int value) {
      EXPECT_TRUE(std::get<0>(data.at("a"))[0].eq(value).all().item<bool>()) << value;
      EXPECT_TRUE(std::get<2>(data.at("a")).eq(value).all().item<bool>()) << value;
    };
    Nested data = make(rank + 1);
    reduce(data, /*dst=*/1);
    expect(data, rank == 1 ? 6 : rank + 1);
    const auto gathered = gather(make(rank), /*dst=*/2);
    ASSERT_EQ(gathered.size(), rank == 2 ? 3U : 0U);
    for (std::size_t r = 0; r < gathered.size(); ++r) expect(gathered[r], static_cast<int>(r));

    std::vector<Nested> parts;
    for (int r = 0; r < 3; ++r) parts.push_back(make(10 * rank + r));
    scatter(data, rank == 1 ? parts : std::vector<Nested>(), /*src=*/1);
    expect(data, 10 + rank);
    reduce_scatter(data, parts);
    expect(data, 30 + 3 * rank);
    const auto swapped = all_to_all(parts);
    ASSERT_EQ(swapped.size(), 3U);
    for (int r = 0; r < 3; ++r) expect(swapped[static_cast<std::size_t>(r)], 10 * r + rank);
    if (rank == 0) send(parts[2], /*dst=*/2);
    if (rank == 2) {
      recv(data, /*src=*/0);
      expect(data, 2);
    }

    std::vector<Nested> unlike = parts;
    std::get<0>(unlike[1]["a"]).push_back(at::ones({2}));
    EXPECT_THROW(reduce_scatter(data, {parts[0]}), UsageError);
    EXPECT_THROW(reduce_scatter(data, unlike), UsageError);
    EXPECT_THROW(all_to_all(unlike), UsageError);
    EXPECT_THROW(all_to_all(std::vector<Nested>()), UsageError);
    if (rank == 1) {
      EXPECT_THROW(scatter(data, unlike, /*src=*/1), UsageError);
    }
  });
}

TEST(TensorTreesTest, all_reduce_dict_names_what_differs) {
  on_ranks(2, [](int rank) {
    std::map<std::string, Tensor> dict{{"loss", at::full({2}, rank)},
                                       {"n", at::full({}, 3, at::kLong)}};
    all_reduce_dict(dict);
    EXPECT_TRUE(dict["loss"].eq(1).all().item<bool>());
    EXPECT_EQ(dict["n"].item<std::int64_t>(), 6);
  });
  const auto differ = [](int rank) {
    std::map<std::string, Tensor> dict{{"loss", at::ones({1})}};
    if (rank == 1) dict["accuracy"] = at::ones({1});
    try {
      all_reduce_dict(dict);
    } catch (const MismatchError& error) {
      test::expect_contains(error.what(), "accuracy");
      EXPECT_EQ(dict["loss"].item<float>(), 1);
      throw;
    }
  };
  EXPECT_THROW(on_ranks(2, differ), MismatchError);
}

TEST(TensorTreesTest, all_reduce_params_in_buckets_of_any_size) {
  on_ranks(3, [](int rank) {
    for (const bool coalesce : {true, false}) {
      for (const double mb : {-1.0, 0.0, 1e-5, 25.0}) {
        torch::nn::Linear net(3, 2);
        const at::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.fill_(rank);
        auto tensors = net->parameters();
        tensors.push_back(at::full({2, 2}, 3 * rank, at::kDouble).t());
        all_reduce_params(tensors, coalesce, mb);  // a sum, as mmengine's
        EXPECT_TRUE(net->weight.eq(3).all().item<bool>());
        EXPECT_TRUE(net->bias.eq(3).all().item<bool>());
        EXPECT_TRUE(tensors[2].eq(9).all().item<bool>());
        all_reduce_params(tensors, coalesce, mb, ReduceOp::mean);
        EXPECT_TRUE(net->weight.eq(3).all().item<bool>());
        EXPECT_TRUE(tensors[2].eq(9).all().item<bool>());
      }
    }
  });
}

/// libtorch's parameters() has a parameter under two names twice.
TEST(TensorTreesTest, a_tensor_that_comes_twice_is_reduced_once) {
  on_ranks(3, [](int rank) {
    torch::nn::Linear net(3, 3);
    net->register_parameter("tied", net->weight);
    const auto tied = net->parameters();
    ASSERT_EQ(tied.size(), 3U);
    for (const bool coalesce : {true, false}) {
      for (const double mb : {-1.0, 0.0}) {
        {
          const at::NoGradGuard no_grad;
          for (Tensor parameter : tied) parameter.fill_(rank);
        }
        all_reduce_params(tied, coalesce, mb);
        for (const Tensor& parameter : tied) EXPECT_TRUE(parameter.eq(3).all().item<bool>());
      }
    }
    const Tensor loss = at::full({2}, rank);
    std::map<std::string, Tensor> dict{{"loss", loss}, {"total", loss}};
    all_reduce_dict(dict);
    EXPECT_TRUE(loss.eq(3).all().item<bool>());
  });
}

TEST(TensorOpsTest, a_tensor_has_another_memory_before_its_call_has_ended) {
  on_ranks(2, [](int rank) {
    Tensor x = at::full({1000}, rank + 1.0);
    auto work = all_reduce_async(x);
    x.set_data(at::zeros({1000}));
    work.wait();
    EXPECT_TRUE(x.eq(3).all().item<bool>());
  });
}

TEST(TensorOpsTest, no_parts_and_no_memory_are_refused) {
  on_ranks(2, [](int rank) {
    Tensor x = at::ones({8});
    if (rank == 0) {
      EXPECT_THROW(scatter(x, {}, /*src=*/0), UsageError);
      Tensor freed = at::ones({8});
      freed.storage().set_data_ptr(c10::DataPtr(nullptr, at::kCPU));
      EXPECT_THROW(all_reduce(freed), UsageError);
    }
  });
}

/// Each entry's values are those from before the call, whichever way it shares memory.
TEST(TensorTreesTest, entries_that_share_memory_are_reduced_once) {
  const auto is = [](const Tensor& tensor, int value) {
    return tensor.eq(value).all().item<bool>();
  };
  on_ranks(3, [&](int rank) {
    const auto make = [&] { return at::full({4, 3}, rank + 1); };
    const auto twice = [](const Tensor& x) { return std::vector{x, x}; };
    const auto view = [](const Tensor& x) { return std::vector{x.view({12}), x.detach()}; };
    const auto rows = [](const Tensor& x) {
      return std::vector{x.narrow(0, 0, 3), x.narrow(0, 1, 3)};
    };
    const auto columns = [](const Tensor& x) { return std::vector{x, x.t(), x.select(1, 1)}; };
    const auto strided_first = [](const Tensor& x) {
      return std::vector{x.t(), x.select(1, 1), x};
    };
    for (const auto& entries_of : std::vector<std::function<std::vector<Tensor>(const Tensor&)>>{
             twice, view, rows, columns, strided_first}) {
      Tensor x = make();
      auto list = entries_of(x);
      all_reduce(list);
      EXPECT_TRUE(is(x, 6)) << x;
      x = make();
      list = entries_of(x);
      reduce(list, /*dst=*/1);
      EXPECT_TRUE(is(x, rank == 1 ? 6 : rank + 1)) << x;
      x = make();
      list = entries_of(x);
      broadcast(list, /*src=*/2);
      EXPECT_TRUE(is(x, 3)) << x;
      for (const bool coalesce : {true, false}) {
        for (const double mb : {-1.0, 0.0}) {
          x = make();
          all_reduce_params(entries_of(x), coalesce, mb);
          EXPECT_TRUE(is(x, 6)) << x;
        }
      }
      x = make();
      std::map<std::string, Tensor> dict;
      for (const Tensor& entry : entries_of(x)) dict[std::to_string(dict.size())] = entry;
      all_reduce_dict(dict);
      EXPECT_TRUE(is(x, 6)) << x;
      x = make();
      dict.clear();
      for (const Tensor& entry : entries_of(x)) dict[std::to_string(dict.size())] = entry;
      all_reduce(dict);
      EXPECT_TRUE(is(x, 6)) << x;
    }
  });
}

TEST(TensorTreesTest, results_that_differ_cannot_share_memory) {
  on_ranks(2, [](int rank) {
    const Tensor x = at::zeros({3});
    std::vector<Tensor> twice{x, x}, views{x.narrow(0, 0, 2), x.narrow(0, 1, 2)};
    for (auto* const data : {&twice, &views}) {
      const std::vector<std::vector<Tensor>> parts(
          2, {at::ones_like((*data)[0]), at::ones_like((*data)[1])});
      EXPECT_THROW(reduce_scatter(*data, parts), UsageError);
      EXPECT_THROW(scatter(*data, parts), UsageError);
      const Group group = default_group().duplicate();  // which the refused recv ends
      EXPECT_THROW(recv(*data, /*src=*/1 - rank, group), UsageError);
    }
    // Columns lie between each other, and share none.
    const Tensor matrix = at::zeros({4, 2}, at::kLong);
    std::vector<Tensor> columns{matrix.select(1, 0), matrix.select(1, 1)};
    scatter(columns, {{at::full({4}, 1), at::full({4}, 2)}, {at::full({4}, 3), at::full({4}, 4)}});
    EXPECT_TRUE(columns[0].eq(rank == 0 ? 1 : 3).all().item<bool>());
    EXPECT_TRUE(columns[1].eq(rank == 0 ? 2 : 4).all().item<bool>());
    // A part that is the place of an earlier result is sent with the values from before the call.
    const Tensor a = at::full({2}, 1), b = at::full({2}, 2);
    std::vector<Tensor> results{a, b};
    reduce_scatter(results, {{a, a}, {b, a}});
    EXPECT_TRUE(a.eq(rank == 0 ? 2 : 4).all().item<bool>()) << a;
    EXPECT_TRUE(b.eq(2).all().item<bool>()) << b;
  });
}

TEST(TensorTreesTest, devices) {
  const std::vector<Tensor> cpu{at::ones({1}), at::ones({2})};
  EXPECT_EQ(get_data_device(cpu), at::Device(at::kCPU));
  EXPECT_EQ(get_data_device(cpu[0]), at::Device(at::kCPU));
  EXPECT_THROW(get_data_device(std::vector<Tensor>()), UsageError);
  EXPECT_THROW(get_data_device(std::pair(cpu[0], at::empty({1}, at::Device(at::kMeta)))),
               UsageError);
  EXPECT_EQ(get_comm_device(), at::Device(at::kCPU));
  const auto moved = cast_data_device(std::pair(cpu, 3), at::kMeta);
  EXPECT_EQ(moved.first[1].device(), at::Device(at::kMeta));
  EXPECT_EQ(cpu[1].device(), at::Device(at::kCPU));
  EXPECT_TRUE(cast_data_device(cpu, at::kCPU)[0].is_same(cpu[0]));
  const auto by_name = cast_data_device(std::unordered_map<int, Tensor>{{1, cpu[0]}}, at::kMeta);
  EXPECT_EQ(get_data_device(by_name), at::Device(at::kMeta));
}

std::vector<std::size_t> epoch_of(DistributedSampler& sampler) {
  std::vector<std::size_t> indices;
  sampler.reset();
  while (const auto batch = sampler.next(3)) {
    indices.insert(indices.end(), batch->begin(), batch->end());
  }
  return indices;
}

TEST(DistributedSamplerTest, no_sample_is_lost_or_doubled) {
  for (const std::size_t size : {0U, 1U, 2U, 3U, 10U, 12U}) {
    for (const bool shuffle : {false, true}) {
      for (const UnevenTail tail : {UnevenTail::keep, UnevenTail::pad, UnevenTail::drop}) {
        on_ranks(3, [&](int rank) {
          DistributedSampler sampler(size, {.shuffle = shuffle, .seed = 5, .tail = tail});
          for (int epoch = 0; epoch < 2; ++epoch) {
            const auto mine = epoch_of(sampler);
            EXPECT_EQ(mine.size(), sampler.n_samples());
            const std::vector<std::int64_t> values(mine.begin(), mine.end());
            const auto all = lockstep::all_gather(std::span(values));
            std::vector<int> seen(size);
            for (const auto& of_rank : all) {
              for (const auto index : of_rank) ++seen.at(static_cast<std::size_t>(index));
              if (tail != UnevenTail::keep) {
                EXPECT_EQ(of_rank.size(), all[0].size());
              }
            }
            const auto twice = std::count(seen.begin(), seen.end(), 2);
            const auto lost = std::count(seen.begin(), seen.end(), 0);
            if (tail != UnevenTail::pad) {
              EXPECT_EQ(twice, 0);
            }
            if (tail != UnevenTail::drop) {
              EXPECT_EQ(lost, 0);
            }
            EXPECT_LT(lost, 3);
            (void)rank;
          }
        });
      }
    }
  }
}

TEST(DistributedSamplerTest, shuffles_by_epoch_and_resumes) {
  DistributedSampler sampler(50, {.seed = 1}), other(50, {.seed = 1});
  const auto first = epoch_of(sampler), second = epoch_of(sampler);
  EXPECT_NE(first, second);
  EXPECT_EQ(epoch_of(other), first);
  other.set_epoch(0);
  EXPECT_EQ(epoch_of(other), first);
  DistributedSampler copy = other;  // as a data loader has it
  other.set_epoch(1);
  EXPECT_EQ(epoch_of(copy), second);

  sampler.set_epoch(1);
  sampler.reset();
  sampler.next(7);
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  DistributedSampler resumed(50, {.seed = 1});
  resumed.load(in);
  EXPECT_EQ(*resumed.next(3), (std::vector<std::size_t>(second.begin() + 7, second.begin() + 10)));
}

TEST(DistributedSamplerTest, feeds_a_data_loader) {
  on_ranks(2, [](int rank) {
    auto dataset = torch::data::datasets::TensorDataset(at::arange(9))
                       .map(torch::data::transforms::Stack<torch::data::TensorExample>());
    auto loader = torch::data::make_data_loader(
        std::move(dataset), DistributedSampler(9, {.shuffle = false}),
        torch::data::DataLoaderOptions().batch_size(2).enforce_ordering(true));
    std::vector<Tensor> seen;
    for (auto& batch : *loader) seen.push_back(batch.data);
    EXPECT_TRUE(at::cat(seen).equal(at::arange(rank, 9, 2)));
  });
}

}  // namespace
}  // namespace lockstep::nn
