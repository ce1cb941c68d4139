#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"

namespace lockstep::nn::tensor_objects_test {
namespace {

using at::Tensor;
using testing::on_ranks;

Tensor round_trip(const Tensor& tensor) {
  lockstep::detail::Bytes bytes;
  lockstep::detail::encode(bytes, tensor);
  Tensor back = at::ones({1});
  lockstep::detail::decode(bytes.span(), back);
  return back;
}

bool same(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.equal(b);
}

TEST(TensorObjectsTest, every_type_and_layout) {
  for (const auto type :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    const Tensor values = at::arange(24).remainder(2).to(type).view({2, 3, 4});
    EXPECT_TRUE(same(round_trip(values), values)) << type;
    const Tensor strided = values.transpose(0, 2).select(1, 1);
    EXPECT_TRUE(same(round_trip(strided), strided)) << type;
    EXPECT_TRUE(round_trip(strided).is_contiguous());
  }
  EXPECT_TRUE(same(round_trip(at::scalar_tensor(3.5)), at::scalar_tensor(3.5)));
  const Tensor none = at::empty({3, 0, 5}, at::kLong);
  EXPECT_TRUE(same(round_trip(none), none));
  EXPECT_FALSE(round_trip(Tensor()).defined());
  EXPECT_FALSE(round_trip(at::ones({2}).requires_grad_()).requires_grad());
}

TEST(TensorObjectsTest, rejects_non_dense_tensors) {
  EXPECT_THROW(round_trip(at::ones({2, 2}).to_sparse()), UsageError);
  EXPECT_THROW(round_trip(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)), UsageError);
}

/// A message as a damaged or hostile peer might send it.
TEST(TensorObjectsTest, a_message_with_false_sizes_is_rejected) {
  const auto decode = [](std::uint8_t type, const std::vector<std::int64_t>& sizes,
                         std::uint64_t n_bytes, std::size_t n_sent) {
    lockstep::detail::Bytes bytes;
    lockstep::detail::Writer writer(bytes);
    writer(type, static_cast<std::uint8_t>(sizes.size()));
    for (const std::int64_t size : sizes) writer(size);
    writer.write(&n_bytes, sizeof n_bytes);
    for (std::size_t i = 0; i < n_sent; ++i) writer(std::uint8_t{2});
    writer.finish();
    Tensor tensor;
    lockstep::detail::decode(bytes.span(), tensor);
    return tensor;
  };
  constexpr auto kFloat = static_cast<std::uint8_t>(at::kFloat);
  constexpr auto kBool = static_cast<std::uint8_t>(at::kBool);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(decode(kFloat, {2}, 8, 8).numel(), 2);
  EXPECT_ANY_THROW(decode(77, {2}, 8, 8));      // no such type
  EXPECT_ANY_THROW(decode(kFloat, {3}, 8, 8));  // sizes and bytes differ
  EXPECT_ANY_THROW(decode(kFloat, {-2}, 8, 8));
  EXPECT_ANY_THROW(decode(kFloat, {kMax, kMax}, 4, 4));     // overflows
  EXPECT_ANY_THROW(decode(kFloat, {0, kMax, kMax}, 0, 0));  // overflows in the strides
  EXPECT_ANY_THROW(decode(kFloat, {1 << 20}, 4 << 20, 8));  // more than was sent
  EXPECT_ANY_THROW(decode(kBool, {2}, 2, 2));               // neither true nor false
}

TEST(TensorObjectsTest, collectives) {
  on_ranks(3, [](int rank) {
    const Tensor mine = at::full({rank, 2}, rank, rank == 1 ? at::kLong : at::kFloat);
    const auto all = all_gather_object(mine);
    ASSERT_EQ(all.size(), 3U);
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(same(all[static_cast<std::size_t>(r)],
                       at::full({r, 2}, r, r == 1 ? at::kLong : at::kFloat)));
    }
    const auto at_one = gather_object(mine, /*dst=*/1);
    EXPECT_EQ(at_one.has_value(), rank == 1);
    using Named = std::map<std::string, std::vector<Tensor>>;
    Named state = rank == 2 ? Named{{"w", {at::ones({2}), Tensor()}}} : Named();
    broadcast_object(state, /*src=*/2);
    ASSERT_EQ(state.size(), 1U);
    EXPECT_TRUE(same(state["w"][0], at::ones({2})));
    EXPECT_FALSE(state["w"][1].defined());
  });
}

TEST(TensorObjectsTest, collect_results_of_tensors_and_labels) {
  on_ranks(2, [](int rank) {
    using Item = std::pair<std::string, Tensor>;
    std::vector<Item> part;
    for (int i = rank; i < 5; i += 2) part.emplace_back(std::to_string(i), at::full({i}, i));
    const auto all = collect_results(part, 5);
    ASSERT_EQ(all.has_value(), rank == 0);
    for (int i = 0; rank == 0 && i < 5; ++i) {
      const auto& [label, tensor] = (*all)[static_cast<std::size_t>(i)];
      EXPECT_EQ(label, std::to_string(i));
      EXPECT_TRUE(same(tensor, at::full({i}, i)));
    }
  });
}

// --- asynchronous operations
// -------------------------------------------------------------------------

TEST(TensorAsyncTest, every_operation) {
  on_ranks(2, [](int rank) {
    const int other = 1 - rank;
    const auto mine = [rank](int add = 0) { return at::full({3}, rank + 1 + add, at::kDouble); };
    const Tensor sum = mine(), reduced = mine(), sent = mine(), scattered = mine(), part = mine();
    auto a = all_reduce_async(sum);
    auto b = reduce_async(reduced, /*dst=*/1);
    auto c = broadcast_async(sent, /*src=*/1);
    auto d = all_gather_async(mine());
    auto e = gather_async(mine(), /*dst=*/1);
    auto f = scatter_async(scattered, {mine(10), mine(20)}, /*src=*/0);
    auto g = reduce_scatter_async(part, {mine(10), mine(20)});
    auto h = all_to_all_async({mine(10), mine(20)});
    a.wait();
    b.wait();
    c.wait();
    f.wait();
    g.wait();
    EXPECT_TRUE(sum.eq(3).all().item<bool>());
    EXPECT_TRUE(reduced.eq(rank == 1 ? 3 : 1).all().item<bool>());
    EXPECT_TRUE(sent.eq(2).all().item<bool>());
    EXPECT_TRUE(scattered.eq(rank == 0 ? 11 : 21).all().item<bool>());
    EXPECT_TRUE(part.eq(rank == 0 ? 23 : 43).all().item<bool>());
    const auto gathered = d.wait(), at_one = e.wait(), exchanged = h.wait();
    ASSERT_EQ(gathered.size(), 2U);
    EXPECT_TRUE(gathered[1].eq(2).all().item<bool>());
    EXPECT_EQ(at_one.size(), rank == 1 ? 2U : 0U);
    EXPECT_TRUE(exchanged[0].eq(1 + (rank == 0 ? 10 : 20)).all().item<bool>());
    EXPECT_TRUE(d.done() && a.done());
    EXPECT_EQ(d.wait().size(), 2U) << "again";

    Tensor got = at::zeros({3}, at::kDouble);
    auto to = send_async(mine(), other);
    auto from = recv_async(got, other);
    to.wait();
    from.wait();
    EXPECT_TRUE(got.eq(other + 1).all().item<bool>());
  });
}

TEST(TensorAsyncTest, a_strided_tensor_is_filled_by_wait) {
  on_ranks(2, [](int rank) {
    const Tensor whole = at::zeros({3, 4});
    whole.select(1, 2).fill_(rank + 1);
    auto work = all_reduce_async(whole.select(1, 2), ReduceOp::mean);
    work.wait();
    work.wait();  // the second time nothing is left to do
    EXPECT_TRUE(whole.select(1, 2).eq(1.5).all().item<bool>());
    EXPECT_EQ(whole.sum().item<float>(), 4.5);
  });
}

TEST(TensorAsyncTest, the_callers_fault_is_thrown_at_once) {
  EXPECT_THROW(all_reduce_async(Tensor()), UsageError);
  EXPECT_THROW(all_to_all_async({}), UsageError);
  EXPECT_THROW(scatter_async(at::ones({2}), {at::ones({3})}), UsageError);
  TensorWork none;
  none.wait();
  EXPECT_TRUE(none.done());
}

TEST(TensorAsyncTest, a_failure_comes_out_of_wait) {
  on_ranks(2, [](int rank) {
    const Tensor data = at::ones({2});
    auto work = rank == 0 ? all_reduce_async(data) : broadcast_async(data);
    EXPECT_THROW(work.wait(), MismatchError);
  });
}

}  // namespace
}  // namespace lockstep::nn::tensor_objects_test
