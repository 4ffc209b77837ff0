// The threads, the choice of tier, and the functions that Python calls.

#include "abi.h"

#include <atomic>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xmmintrin.h>

namespace {

// --- the pool ------------------------------------------------------------------------------------
//
// A job is cut into chunks. `claim` = job number << 24 | chunks left: a thread owns a chunk once its
// compare-exchange has taken one off, so a thread that wakes late, with an old job in mind, fails
// and touches nothing. What the job is may be read by owners of a chunk only; it is written only
// between jobs, when no chunk is owned. The caller waits for owned chunks, never for a thread that
// has not woken. (A number recurs after 2^40 jobs: years.)

constexpr int LEFT_BITS = 24, MAX_WORKERS = 255;
constexpr uint64_t LEFT_MASK = (1 << LEFT_BITS) - 1;
constexpr int64_t SPIN_NS = 100000;  // longer than the gaps between a step's jobs
constexpr int64_t LOST_NS = 2000000, FIRST_REST_NS = 5000000, LAST_REST_NS = 320000000;

using Body = void (*)(void*, int64_t, int64_t);

struct Job { Body body; void* context; int64_t count, grain, chunks; };

alignas(64) std::atomic<uint64_t> claim;
Job job;
std::atomic<int> caller_cpu;
alignas(64) std::atomic<uint32_t> done;    // chunks of this job that workers have finished
std::atomic<uint32_t> caller_sleeps;
std::atomic<int64_t> wait_began;
alignas(64) std::atomic<uint32_t> bell;    // futex of the workers: counts wake-ups
std::atomic<uint32_t> sleepers;            // at least the workers that sleep or are about to
std::atomic<uint32_t> stopping;
std::atomic<int32_t> resting;
alignas(64) std::atomic<uint32_t> in_use;  // a caller is inside; a second one goes alone

pthread_t workers[MAX_WORKERS];
int num_workers;
pid_t home;  // a forked child has no workers to join
int64_t jobs, long_waits, longest_wait_ns;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t ns = 0) {  // 0: for good
  timespec limit{ns / 1000000000, ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, ns ? &limit : nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

template <class Ready>
bool spin(int64_t ns, const Ready& ready, bool gives_way) {  // until ready, or for ns
  for (int64_t start = 0; ; ) {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      _mm_pause();
    }
    if (gives_way && sched_getcpu() == caller_cpu.load(std::memory_order_relaxed)) return false;
    int64_t now = now_ns();
    if (!start) start = now;
    if (now - start > ns) return false;
  }
}

uint32_t work(uint64_t number) {  // runs chunks of this job until none is left; returns how many
  uint32_t ran = 0;
  uint64_t at = claim.load(std::memory_order_acquire);
  while (at >> LEFT_BITS == number && (at & LEFT_MASK)) {
    if (!claim.compare_exchange_weak(at, at - 1, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) continue;
    int64_t begin = (job.chunks - (int64_t)(at & LEFT_MASK)) * job.grain;
    int64_t end = begin + job.grain;
    job.body(job.context, begin, end < job.count ? end : job.count);
    ran++;
    at = claim.load(std::memory_order_acquire);
  }
  return ran;
}

// Where other programs use the CPUs, a worker may be descheduled inside a chunk while the caller
// waits. One that loses the caller more than a third of the time brings nothing: it rests, for twice
// as long each time it soon happens again.
struct Rest {
  int64_t ns = FIRST_REST_NS, ended = 0, lost = 0, counted = 0;
  long switches = 0;

  void count() {  // the caller has been waiting for this worker, who may be to blame
    rusage used;
    getrusage(RUSAGE_THREAD, &used);
    bool was_descheduled = used.ru_nivcsw != switches;
    switches = used.ru_nivcsw;
    if (!was_descheduled) return;
    int64_t now = now_ns();
    lost -= (now - counted) / 3;
    lost = (lost > 0 ? lost : 0) + now - wait_began.load();
    counted = now;
    if (lost > LOST_NS) take();
  }

  void take() {
    int64_t now = now_ns();
    ns = now - ended > 8 * ns ? FIRST_REST_NS : ns < LAST_REST_NS ? 2 * ns : ns;
    resting.fetch_add(1);
    for (int64_t end = now + ns; now < end && !stopping.load(); now = now_ns())
      sleep_on(stopping, 0, end - now);
    resting.fetch_sub(1);
    ended = counted = now;
    lost = 0;
  }
};

bool move_away() {  // from the caller's CPU; false where there is no other
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return false;
  others = allowed;
  CPU_CLR(caller_cpu.load(std::memory_order_relaxed), &others);
  bool moved = CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others);
  return moved && !sched_setaffinity(0, sizeof allowed, &allowed);
}

// A program beside its caller: the first worker that sees it runs it as a caller would, unless the
// one who posted it comes to wait for it before; who waits helps like a worker.
enum : uint32_t { NONE, POSTED, TAKEN, FINISHED };
struct Posted { const Op* ops; int32_t count; const Step* step; } posted;
std::atomic<uint32_t> posted_state;

bool run_posted();

void ring() {
  if (sleepers.load() && sleepers.exchange(0)) {
    bell.fetch_add(1);
    wake_all(bell);
  }
}

template <class Over>
void serve(const Over& over, Rest* rest) {  // job after job until over; rest: a worker's
  uint64_t seen = (claim.load() >> LEFT_BITS) - 1;
  auto called = [&] {
    return claim.load(std::memory_order_acquire) >> LEFT_BITS != seen || over() ||
           (rest && posted_state.load(std::memory_order_relaxed) == POSTED);
  };
  while (true) {
    if (!spin(SPIN_NS, called, true)) {
      sleepers.fetch_add(1);
      uint32_t rung = bell.load();
      if (!called()) sleep_on(bell, rung);
      bool in_the_way = sched_getcpu() == caller_cpu.load(std::memory_order_relaxed);
      if (in_the_way && !move_away() && rest) rest->take();
      continue;
    }
    if (over()) return;
    if (rest && run_posted()) continue;
    seen = claim.load(std::memory_order_acquire) >> LEFT_BITS;
    if (uint32_t ran = work(seen)) {
      done.fetch_add(ran);  // the caller may go on: from here the job is not ours to touch
      if (caller_sleeps.load()) {
        wake_all(done);
        if (rest) rest->count();
      }
    }
  }
}

void* worker(void*) {
  Rest rest;
  serve([] { return stopping.load() != 0; }, &rest);
  return nullptr;
}

void wait_for(uint32_t others) {
  auto finished = [&] { return done.load() == others; };
  if (finished()) return;
  int64_t start = now_ns();
  wait_began.store(start);
  while (!spin(SPIN_NS, finished, false)) {  // a worker was descheduled inside a chunk: give way
    caller_sleeps.store(1);
    uint32_t before = done.load();
    if (before != others) sleep_on(done, before);
    caller_sleeps.store(0);
  }
  int64_t waited = now_ns() - start;
  if (waited > 1000000) long_waits++;
  if (waited > longest_wait_ns) longest_wait_ns = waited;
}

void stop_workers() {
  if (home == getpid()) {
    stopping.store(1);
    bell.fetch_add(1);
    wake_all(bell);
    wake_all(stopping);
    for (int i = 0; i < num_workers; i++) pthread_join(workers[i], nullptr);
  } else {
    in_use.store(0);
  }
  num_workers = 0;
  stopping.store(0);
  sleepers.store(0);
  resting.store(0);
}

bool start_workers(int count) {
  home = getpid();
  sigset_t all, before;  // signals are the main thread's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (num_workers < count) {
    if (pthread_create(&workers[num_workers], nullptr, worker, nullptr)) break;
    num_workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return num_workers == count;
}

// --- the tiers -----------------------------------------------------------------------------------

const Tier* tier = nullptr;

bool cpu_has(int index) {
  if (index == 2)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  if (index == 1)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  return index == 0;
}

}  // namespace

extern "C" void kagari_parallel(int64_t count, int64_t grain, Body body, void* context) {
  int64_t chunks = count <= 0 ? 0 : (count + grain - 1) / grain;
  if (chunks < 2 || chunks > (int64_t)LEFT_MASK || !num_workers || in_use.exchange(1)) {
    for (int64_t begin = 0; begin < count; begin += grain)
      body(context, begin, begin + grain < count ? begin + grain : count);
    return;
  }
  jobs++;
  caller_cpu.store(sched_getcpu(), std::memory_order_relaxed);
  job = {body, context, count, grain, chunks};
  done.store(0, std::memory_order_relaxed);
  uint64_t number = (claim.load(std::memory_order_relaxed) >> LEFT_BITS) + 1;
  claim.store(number << LEFT_BITS | (uint64_t)chunks);
  ring();
  wait_for((uint32_t)chunks - work(number));
  in_use.store(0);
}

EXPORT int32_t kagari_open(int32_t index, int32_t threads) {
  // → the tier (-1 asks for the best); -1: this CPU lacks it; -2: the threads cannot start
  __builtin_cpu_init();
  if (index < 0) for (index = 2; !cpu_has(index); ) index--;
  if (index > 2 || !cpu_has(index)) return -1;
  stop_workers();
  const Tier* tiers[] = {&kagari_tier_0, &kagari_tier_1, &kagari_tier_2};
  tier = tiers[index];
  if (threads < 1 || threads > MAX_WORKERS + 1 || !start_workers(threads - 1)) {
    stop_workers();
    return -2;
  }
  return index;
}

EXPORT void kagari_close() { stop_workers(); }

EXPORT const char* kagari_tier_name() { return tier ? tier->name : ""; }

EXPORT void kagari_run(const Op* ops, int32_t count, const Step* step) {
  unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);  // the workers' rounding and subnormals, whatever the caller has set
  for (int32_t i = 0; i < count; i++) tier->run[ops[i].kind](ops[i].args, step);
  _mm_setcsr(mode);
}

namespace {

bool run_posted() {
  uint32_t expected = POSTED;
  if (!posted_state.compare_exchange_strong(expected, TAKEN)) return false;
  kagari_run(posted.ops, posted.count, posted.step);
  posted_state.store(FINISHED);
  ring();
  return true;
}

}  // namespace

// kagari_run beside the caller, who goes on at once; one at a time, and then kagari_finish.
EXPORT void kagari_start(const Op* ops, int32_t count, const Step* step) {
  posted = {ops, count, step};
  posted_state.store(POSTED);
  ring();
}

EXPORT void kagari_finish() {
  unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);
  if (posted_state.load() != NONE && !run_posted())
    serve([] { return posted_state.load() == FINISHED; }, nullptr);
  posted_state.store(NONE);
  _mm_setcsr(mode);
}

EXPORT void kagari_pool_stats(int64_t* out) {  // jobs, waits over 1 ms, longest wait µs, workers
  int64_t stats[] = {jobs, long_waits, longest_wait_ns / 1000, num_workers - resting.load()};
  memcpy(out, stats, sizeof stats);
}

EXPORT void kagari_verify_tags(const int64_t* tags, const int32_t* pages,
                               const int64_t* generations, const int32_t* rows, int64_t pairs,
                               uint8_t* wrong) {  // see reference.py; wrong [rows] comes zeroed
  for (int64_t i = 0; i < pairs; i++) wrong[rows[i]] |= tags[pages[i]] != generations[i];
}

EXPORT int64_t kagari_sizeof(int32_t index) {  // of the structs, in the file's order
  static const int64_t sizes[] = {sizeof(Packed), sizeof(Quants), sizeof(Span), sizeof(Step),
                                  sizeof(Arena), sizeof(Embed), sizeof(Norm), sizeof(Gemm),
                                  sizeof(Rope), sizeof(Attend), sizeof(Gate), sizeof(Best),
                                  sizeof(Op)};
  return index >= 0 && index < 13 ? sizes[index] : -1;
}

// Floats of Attend.scratch for steps of so many rows and contexts; with less, less is split.
EXPORT int64_t kagari_attention_scratch(int32_t rows, int32_t heads, int32_t dim,
                                        int32_t context_tokens, int32_t threads) {
  const int64_t split = rows < 32 * threads ? rows : 32 * threads;
  const int64_t states = split * heads * (context_tokens / KEY_SEGMENT + 1) * (dim + 16);
  return attention_tables(rows, threads) + (int64_t)rows * heads * dim +
         (states < 1 << 23 ? states : 1 << 23);
}
