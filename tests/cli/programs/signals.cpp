// A rank with a helper process in its process group, as a DataLoader's worker is: prints the
// signals that reach the rank, and whether one had reached the helper by then; the helper prints
// the first signal that it gets after the rank has ended.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <lockstep/lockstep.hpp>

namespace {

sigset_t handled() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) sigaddset(&signals, number);
  return signals;
}

int wait_for_signal() {
  const sigset_t signals = handled();
  int number = 0;
  sigwait(&signals, &number);
  return number;
}

bool is_signal_pending() {
  sigset_t pending;
  sigpending(&pending);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) {
    if (sigismember(&pending, number) == 1) return true;
  }
  return false;
}

void say(const char* text, int number, const char* more) {
  std::printf("%s got SIG%s%s\n", text, sigabbrev_np(number), more);
  std::fflush(stdout);
}

[[noreturn]] void help(int questions, int answers) {
  char question = 0;
  while (read(questions, &question, 1) == 1) {
    const char answer = is_signal_pending() ? 'y' : 'n';
    if (write(answers, &answer, 1) != 1) std::abort();
  }
  say("helper", wait_for_signal(), "");
  std::_Exit(0);
}

}  // namespace

int main() {
  const sigset_t signals = handled();
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  lockstep::init_dist();
  int questions[2];
  int answers[2];
  if (pipe(questions) != 0 || pipe(answers) != 0) return 1;
  const pid_t helper = fork();
  if (helper < 0) return 1;
  if (helper == 0) {
    close(questions[1]);
    close(answers[0]);
    help(questions[0], answers[1]);
  }
  std::printf("ready\n");
  std::fflush(stdout);
  while (true) {
    const int number = wait_for_signal();
    char answer = 'n';
    if (write(questions[1], &answer, 1) != 1 || read(answers[0], &answer, 1) != 1) return 1;
    say("rank", number, answer == 'y' ? ", as its helper" : " alone");
    if (number != SIGUSR1 && number != SIGUSR2) return 0;
  }
}
