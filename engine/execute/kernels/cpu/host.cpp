// The kernels' threads, the choice of instruction set, and the functions that Python calls.

#include "abi.h"

#include <atomic>
#include <cpuid.h>
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

// --- instruction sets ----------------------------------------------------------------------------

const RunOp* kernels;  // of the instruction set that is open
const int64_t near_bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);  // 0, -1: not known

// Whether the CPU has AMX, and the system lets this process use it: it wants to be asked first, and
// refuses where a thread's stack for signals has no room for the tiles.
bool has_tiles() {
  unsigned a, b, c, d = 0;
  constexpr unsigned wanted = 1 << 22 | 1 << 24 | 1 << 25;  // amx_bf16, amx_tile, amx_int8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return false;
  constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

bool cpu_has(int index) {
#define HAS(name) __builtin_cpu_supports(name)
  if (index < 2) return index == 0 || (index == 1 && HAS("avx2") && HAS("fma") && HAS("f16c"));
  if (index == 4) return cpu_has(3) && has_tiles();
  if (index == 3) return cpu_has(2) && HAS("avx512bf16");
  return index == 2 && cpu_has(1) && HAS("bmi2") && HAS("avx512f") && HAS("avx512bw") &&
         HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl") && HAS("avx512vnni");
}

struct Rounding {  // to nearest, with subnormals, whatever the thread has had
  const unsigned before = _mm_getcsr();
  Rounding() { _mm_setcsr(0x1f80); }
  ~Rounding() { _mm_setcsr(before); }
};

}  // namespace

EXPORT void kagari_run(const Op* ops, int32_t count, const Step* step) {
  const Rounding rounding;
  for (int32_t i = 0; i < count; i++) kernels[ops[i].kind](ops[i].args, step);
}

namespace {

// --- the pool ------------------------------------------------------------------------------------
//
// A job is cut into shares. `claim` = the job's number × 2^24 + shares left: a thread owns a share
// once its compare-exchange has taken one off, so a thread that wakes late, with an old job in mind,
// fails and touches nothing. What the job is may be read by owners of a share only; it is written
// only between jobs, when no share is owned. The caller waits for owned shares, never for a thread
// that has not woken. (A number recurs after 2^40 jobs: years.)

using std::atomic;
using Flag = atomic<uint32_t>;  // may be slept on

constexpr int MAX_BESIDE = 255;
constexpr uint64_t NUMBER = 1 << 24;  // claim / NUMBER: the job's; claim % NUMBER: shares left
constexpr int64_t MS = 1000000, SPIN_NS = MS / 10;  // longer than the gaps between a step's jobs
constexpr int64_t LOST_NS = 2 * MS, FIRST_REST_NS = 5 * MS, LAST_REST_NS = 320 * MS;

alignas(64) atomic<uint64_t> claim;
struct Job { RunRange body; void* context; int64_t count, grain, shares; } job;
atomic<int> caller_cpu;
alignas(64) Flag done;  // shares of this job that pool threads have finished
Flag caller_sleeps;
atomic<int64_t> wait_began;
alignas(64) Flag bell;  // counts wake-ups of the pool
Flag sleepers;          // at least the pool threads that sleep or are about to
Flag stopping, posted_state;
atomic<int> resting;
alignas(64) Flag in_use;  // a caller is inside; a second one goes alone

// A program beside its caller: the first pool thread that sees it runs it as a caller would, unless the
// one who posted it comes to wait for it before; who waits helps like one.
enum : uint32_t { NONE, POSTED, TAKEN, FINISHED };
struct Posted { const Op* ops; int32_t count; const Step* step; } posted;

pthread_t pool[MAX_BESIDE];
int num_beside;
pid_t home;  // a forked child has no threads to join
int64_t jobs;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 * MS + t.tv_nsec;
}

void sleep_on(Flag& flag, uint32_t value, const timespec* limit = nullptr) {
  syscall(SYS_futex, &flag, FUTEX_WAIT_PRIVATE, value, limit, nullptr, 0);
}

void wake_all(Flag& flag) {
  syscall(SYS_futex, &flag, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void ring() {
  if (!sleepers || !sleepers.exchange(0)) return;
  bell++;
  wake_all(bell);
}

bool is_in_the_way() { return sched_getcpu() == caller_cpu; }

bool move_away() {  // from the caller's CPU; false where there is no other
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return false;
  others = allowed;
  CPU_CLR(caller_cpu, &others);
  return CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others) &&
         !sched_setaffinity(0, sizeof allowed, &allowed);
}

template <class Ready>
bool spin(const Ready& ready, bool gives_way) {  // until ready; false: for too long, or in the way
  for (int64_t end = 0;;) {
    for (int i = 0; i < 32; i++, _mm_pause())
      if (ready()) return true;
    if (gives_way && is_in_the_way()) return false;
    const int64_t now = now_ns();
    if (!end) end = now + SPIN_NS;
    if (now > end) return false;
  }
}

// Where other programs use the CPUs, a thread may be descheduled inside a share while the caller
// waits. One that loses the caller more than a third of the time brings nothing: it rests, for twice
// as long each time it soon happens again.
struct Rest {
  int64_t ns = FIRST_REST_NS, ended = 0, lost = 0, counted = 0;
  long switches = 0;

  void count() {  // the caller has been waiting for this thread, which may be to blame
    rusage used;
    getrusage(RUSAGE_THREAD, &used);
    if (used.ru_nivcsw == switches) return;  // was not descheduled
    switches = used.ru_nivcsw;
    const int64_t now = now_ns(), kept = lost - (now - counted) / 3;
    lost = (kept > 0 ? kept : 0) + now - wait_began;
    counted = now;
    if (lost > LOST_NS) take();
  }

  void take() {
    int64_t now = now_ns();
    ns = now - ended > 8 * ns ? FIRST_REST_NS : ns < LAST_REST_NS ? 2 * ns : ns;
    ended = now + ns;
    resting++;
    for (; now < ended && !stopping; now = now_ns()) {
      const timespec left{0, ended - now};  // LAST_REST_NS is less than a second
      sleep_on(stopping, 0, &left);
    }
    resting--;
    ended = counted = now;
    lost = 0;
  }
};

uint32_t work(uint64_t number) {  // runs shares of this job until none is left; returns how many
  uint32_t ran = 0;
  for (uint64_t at = claim; at / NUMBER == number && at % NUMBER;) {
    if (!claim.compare_exchange_weak(at, at - 1)) continue;
    const int64_t begin = (job.shares - int64_t(at % NUMBER)) * job.grain, end = begin + job.grain;
    job.body(job.context, begin, end < job.count ? end : job.count);
    ran++;
    at = claim;
  }
  return ran;
}

bool run_posted() {
  uint32_t expected = POSTED;
  if (!posted_state.compare_exchange_strong(expected, TAKEN)) return false;
  kagari_run(posted.ops, posted.count, posted.step);
  posted_state = FINISHED;
  ring();
  return true;
}

// Job after job: of a pool thread until the end, of who waits for a posted program (no rest) until then.
void serve(Rest* rest) {
  uint64_t seen = claim / NUMBER - 1;
  const auto is_over = [&] { return rest ? stopping != 0 : posted_state == FINISHED; };
  const auto is_called = [&] {
    return claim / NUMBER != seen || is_over() || (rest && posted_state == POSTED);
  };
  while (!is_over()) {
    if (!spin(is_called, true)) {
      sleepers++;
      const uint32_t rung = bell;
      if (!is_called()) sleep_on(bell, rung);
      if (is_in_the_way() && !move_away() && rest) rest->take();
    } else if (!rest || !run_posted()) {
      seen = claim / NUMBER;
      const uint32_t ran = work(seen);
      if (!ran) continue;
      done += ran;  // the caller may go on: from here the job is not ours to touch
      if (!caller_sleeps) continue;
      wake_all(done);
      if (rest) rest->count();
    }
  }
}

void* pool_thread(void*) {
  Rest rest;
  const Rounding rounding;
  serve(&rest);
  return nullptr;
}

void wait_for(uint32_t others) {
  const auto is_finished = [&] { return done == others; };
  if (is_finished()) return;
  wait_began = now_ns();
  while (!spin(is_finished, false)) {  // a thread was descheduled inside a share: give way
    caller_sleeps = 1;
    const uint32_t before = done;
    if (before != others) sleep_on(done, before);
    caller_sleeps = 0;
  }
}

void stop_pool() {
  if (home == getpid()) {
    stopping = 1;
    bell++;
    wake_all(bell);
    wake_all(stopping);
    for (int i = 0; i < num_beside; i++) pthread_join(pool[i], nullptr);
  } else {
    in_use = 0;
  }
  num_beside = resting = 0;
  stopping = sleepers = 0;
}

bool start_pool(int count) {
  home = getpid();
  sigset_t all, before;  // signals are the main thread's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (num_beside < count && !pthread_create(&pool[num_beside], nullptr, pool_thread, nullptr))
    num_beside++;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return num_beside == count;
}

}  // namespace

void kagari_parallel(int64_t count, int64_t grain, RunRange body, void* context) {
  const int64_t shares = count <= 0 ? 0 : (count + grain - 1) / grain;
  if (shares < 2 || shares >= int64_t(NUMBER) || !num_beside || in_use.exchange(1)) {
    for (int64_t begin = 0; begin < count; begin += grain)
      body(context, begin, begin + grain < count ? begin + grain : count);
    return;
  }
  jobs++;
  caller_cpu = sched_getcpu();
  job = {body, context, count, grain, shares};
  done = 0;
  const uint64_t number = claim / NUMBER + 1;
  claim = number * NUMBER + uint64_t(shares);
  ring();
  wait_for(uint32_t(shares) - work(number));
  in_use = 0;
}

int32_t kagari_threads() { return num_beside + 1; }

int64_t kagari_near_bytes() { return near_bytes > 0 ? near_bytes : 32768; }

// --- what Python calls ---------------------------------------------------------------------------

// → the instruction set (-1 asks for the best); -1: this CPU lacks it; -2: the threads cannot start
EXPORT int32_t kagari_open(int32_t index, int32_t threads) {
  __builtin_cpu_init();
  if (index < 0) for (index = 4; !cpu_has(index);) index--;
  if (!cpu_has(index)) return -1;
  stop_pool();
  const RunOp* isas[] = {kagari_isa_0, kagari_isa_1, kagari_isa_2, kagari_isa_3, kagari_isa_4};
  kernels = isas[index];
  if (threads >= 1 && threads <= MAX_BESIDE + 1 && start_pool(threads - 1)) return index;
  stop_pool();
  return -2;
}

EXPORT void kagari_close() { stop_pool(); }

// kagari_run beside the caller, who goes on at once; one at a time, and then kagari_finish.
EXPORT void kagari_start(const Op* ops, int32_t count, const Step* step) {
  posted = {ops, count, step};
  posted_state = POSTED;
  ring();
}

EXPORT void kagari_finish() {
  const Rounding rounding;
  if (posted_state != NONE && !run_posted()) serve(nullptr);
  posted_state = NONE;
}

EXPORT void kagari_pool_stats(int64_t* out) {  // jobs, pool threads that do not rest
  out[0] = jobs, out[1] = num_beside - resting;
}

EXPORT int64_t kagari_sizeof(int32_t index) {  // of the structs, in the order of abi.h
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
  const int64_t states = split * heads * (context_tokens / KEY_STRETCH + 1) * (dim + 16);
  return attention_tables(rows, threads) + (int64_t)rows * heads * dim +
         (states < 1 << 23 ? states : 1 << 23);
}
