#include "engines/shared/bootstrap/launcher_socket.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <lockstep/error.hpp>
#include <stop_token>
#include <string>
#include <thread>

#include "support/waiting.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

NextWorld ask(const LauncherSocket& sockets, milliseconds timeout) {
  const Call barrier{.op = Op::barrier,
                     .group = "world",
                     .operation = "init_dist",
                     .timeout = timeout,
                     .where = std::source_location::current()};
  return request_next_world(sockets.rank.get(), /*rank=*/0, /*last_generation=*/-1,
                            /*is_elastic=*/false, barrier);
}

TEST(LauncherSocketTest, an_answer_after_the_limit_is_not_that_of_the_next_request) {
  const LauncherSocket sockets = make_launcher_socket();
  const base::UniqueFd segment(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_THROW(ask(sockets, milliseconds(1)), TimeoutError);
  const LauncherRequest late = receive_request(sockets.launcher.get());
  ASSERT_EQ(late.kind, LauncherRequest::Kind::next_world);
  answer(sockets.launcher.get(), late.number, segment.get(), {.size = 2});
  NextWorld next;
  std::thread rank([&] { next = ask(sockets, milliseconds(30'000)); });
  LauncherRequest request{};
  EXPECT_TRUE(test::wait_until([&] {
    request = receive_request(sockets.launcher.get());
    return request.kind == LauncherRequest::Kind::next_world;
  }));
  answer(sockets.launcher.get(), request.number, segment.get(), {.size = 3});
  rank.join();
  EXPECT_EQ(next.size, 3);
}

TEST(LauncherSocketTest, of_several_requests_the_newest_is_answered) {
  const LauncherSocket sockets = make_launcher_socket();
  EXPECT_THROW(ask(sockets, milliseconds(1)), TimeoutError);
  EXPECT_THROW(ask(sockets, milliseconds(2)), TimeoutError);
  const LauncherRequest newest = receive_request(sockets.launcher.get());
  EXPECT_EQ(newest.kind, LauncherRequest::Kind::next_world);
  EXPECT_EQ(newest.limit, milliseconds(2));
  EXPECT_EQ(receive_request(sockets.launcher.get()).kind, LauncherRequest::Kind::none);
}

Call store_call(milliseconds timeout) {
  return {.group = "world",
          .operation = "store",
          .timeout = timeout,
          .where = std::source_location::current()};
}

TEST(LauncherSocketTest, requests_of_two_threads_get_their_own_answers) {
  const LauncherSocket sockets = make_launcher_socket();
  std::jthread launcher([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const LauncherRequest request = receive_request(sockets.launcher.get());
      if (request.kind != LauncherRequest::Kind::store) {
        std::this_thread::yield();
        continue;
      }
      const auto asked = read_store_request(request.bytes);
      answer_store(sockets.launcher.get(), request.number,
                   bytes_of(StoreAnswer{.value = asked ? asked->words.front() : "damaged"}));
    }
  });
  const auto ask_often = [&](const std::string& name) {
    for (int i = 0; i < 200; ++i) {
      const std::string key = name + std::to_string(i) + std::string(i * 300, 'x');
      EXPECT_EQ(
          ask_store(sockets.rank.get(), 0, 0, {.kind = StoreRequest::Kind::get, .words = {key}},
                    store_call(milliseconds(30'000)))
              .value,
          key);
    }
  };
  std::thread other([&] { ask_often("b"); });
  ask_often("a");
  other.join();
}

TEST(LauncherSocketTest, a_request_behind_one_that_waits_ends_by_its_own_limit) {
  const LauncherSocket sockets = make_launcher_socket();
  std::thread first([&] { EXPECT_THROW(ask(sockets, milliseconds(300)), TimeoutError); });
  EXPECT_TRUE(test::wait_until([&] {
    return receive_request(sockets.launcher.get()).kind == LauncherRequest::Kind::next_world;
  }));
  EXPECT_THROW(ask_store(sockets.rank.get(), 0, 0, {}, store_call(milliseconds(1))), TimeoutError);
  first.join();
}

TEST(LauncherSocketTest, a_request_to_the_store_that_is_too_long_is_refused) {
  const LauncherSocket sockets = make_launcher_socket();
  const StoreRequest request{.kind = StoreRequest::Kind::set,
                             .words = {"key", std::string(kMaxStoreBytes, 'x')}};
  EXPECT_THROW(ask_store(sockets.rank.get(), 0, 0, request, store_call(milliseconds(30'000))),
               UsageError);
  EXPECT_EQ(receive_request(sockets.launcher.get()).kind, LauncherRequest::Kind::none);
}

}  // namespace
}  // namespace lockstep::shared
