// Runs the threads of a CUDA grid on one CPU thread: block after block, each thread of a block on a
// stack of its own (a fiber). A fiber runs until it meets others (__syncthreads, __syncwarp, a
// shuffle, a ballot) or ends. When all that it has to meet are there, they are ready to run on.
//
// With seed 0 the ready fibers run first come first served and blocks in order. Any other seed
// shuffles blocks and fibers, and lets warps run far ahead of others or not: what a missing barrier
// lets through then shows as a wrong result under some seeds. A kernel whose blocks wait for earlier ones
// (it has __nanosleep) gets its blocks in order, one by one. Between two meetings a fiber is never
// interrupted: what goes wrong only when two threads alternate within such a stretch does not show.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "cuda_on_cpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
void __asan_unpoison_memory_region(const void*, size_t) {}
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
int cuda_on_cpu::lane;

namespace {

using Word = unsigned long long;
constexpr int MOST_THREADS = 1024, WARP = 32;
constexpr size_t PAGE = 4096, STACK = 256 << 10;  // a sanitizer's report runs on a fiber's stack

enum State { READY, AT_BLOCK, AT_WARP, ENDED };

struct Fiber {
    void* jump[5];  // where it goes on, by __builtin_setjmp: no system call, unlike swapcontext
    char* stack;
    void* fake_stack;
    bool started;
    uint3 index;
    State state;
    const char *what, *file;  // the meeting it waits for
    int line;
    unsigned mask;
    Word value, result;
    int source;
};

struct Launch {
    void (*thread)(void**);
    void** args;
};

Fiber fibers[MOST_THREADS];
int count, live, at_block;       // fibers of the block, those not ended, those at __syncthreads
int queue[MOST_THREADS];         // of ready fibers, a ring
unsigned head, tail;
enum Order { FIRST, LAST, ANY } order;
Word random_state;
Launch launch;
Fiber* current;
void* scheduler[5];
const void* scheduler_stack;
size_t scheduler_stack_size;
char message[2000];

unsigned random_below(unsigned n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return unsigned(random_state >> 33) % n;
}

template <class T> void mix(T* items, unsigned n) {
    for (; random_state && n > 1; n--) std::swap(items[n - 1], items[random_below(n)]);
}

// ---- fibers

#define SWITCHES_STACKS __attribute__((noinline, no_sanitize("address")))

SWITCHES_STACKS void jump_to(void** to) {
    __builtin_longjmp(to, 1);
}

SWITCHES_STACKS void swap_to(void** from, void** to) {
    if (!__builtin_setjmp(from)) jump_to(to);
}

SWITCHES_STACKS void start_from(void** from, ucontext_t* context) {
    if (!__builtin_setjmp(from)) setcontext(context);
}

void leave() {  // the running fiber waits or has ended; returns when it is resumed
    Fiber& fiber = *current;
    __sanitizer_start_switch_fiber(&fiber.fake_stack, scheduler_stack, scheduler_stack_size);
    swap_to(fiber.jump, scheduler);
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_size);
}

void fiber_ended();

void run_fiber() {  // a fiber is used for many blocks
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
    for (;;) {
        launch.thread(launch.args);
        fiber_ended();
        leave();
    }
}

void resume(Fiber& fiber) {
    void* fake_stack = nullptr;
    current = &fiber;
    threadIdx = fiber.index;
    cuda_on_cpu::lane = int(&fiber - fibers) % WARP;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.stack, STACK);
    if (fiber.started) {
        swap_to(scheduler, fiber.jump);
    } else {
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber.stack;
        context.uc_stack.ss_size = STACK;
        makecontext(&context, run_fiber, 0);
        fiber.started = true;
        start_from(scheduler, &context);
    }
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void give_stack(Fiber& fiber) {  // with a page below it that must not be touched
    if (fiber.stack) return;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, PAGE + STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) abort();
    mprotect(memory, PAGE, PROT_NONE);
    fiber.stack = static_cast<char*>(memory) + PAGE;
}

// ---- meetings

void make_ready(Fiber** group, unsigned n) {
    mix(group, n);
    for (unsigned k = 0; k < n; k++) {
        group[k]->state = READY;
        queue[tail++ % MOST_THREADS] = int(group[k] - fibers);
    }
}

bool same_meeting(const Fiber& a, const Fiber& b) {
    return a.state == b.state && a.what == b.what && a.line == b.line && a.mask == b.mask &&
           a.file == b.file;
}

void release_block() {
    Fiber* group[MOST_THREADS];
    int n = 0;
    for (Fiber* fiber = fibers; fiber < fibers + count; fiber++) {
        if (fiber->state == ENDED) continue;
        if (n && !same_meeting(*fiber, *group[0])) return;
        group[n++] = fiber;
    }
    at_block = 0;
    make_ready(group, n);
}

void release_warp(const Fiber& one) {
    Fiber* warp = fibers + (&one - fibers) / WARP * WARP;
    Fiber* group[WARP];
    unsigned n = 0, here = 0, ballot = 0;
    for (int lane = 0; lane < WARP && warp + lane < fibers + count; lane++) {
        Fiber& fiber = warp[lane];
        if (!(one.mask >> lane & 1) || fiber.state == ENDED) continue;
        if (!same_meeting(fiber, one)) return;
        group[n++] = &fiber;
        here |= 1u << lane;
        ballot |= unsigned(fiber.value != 0) << lane;
    }
    for (unsigned k = 0; k < n; k++) {
        int source = group[k]->source;
        if (source == cuda_on_cpu::GET_BALLOT) group[k]->result = ballot;
        else group[k]->result = here >> source & 1 ? warp[source].value : ~Word(0);
    }
    make_ready(group, n);
}

void fiber_ended() {  // those that waited for this one may now be complete
    current->state = ENDED;
    live--;
    if (live && at_block == live) release_block();
    Fiber* warp = fibers + (current - fibers) / WARP * WARP;
    for (Fiber* fiber = warp; fiber < warp + WARP && fiber < fibers + count; fiber++)
        if (fiber->state == AT_WARP) release_warp(*fiber);
}

// ---- blocks

int next_ready() {
    unsigned first = head % MOST_THREADS;
    if (order == ANY)
        std::swap(queue[first], queue[(head + random_below(tail - head)) % MOST_THREADS]);
    return order == LAST ? queue[--tail % MOST_THREADS] : queue[head++ % MOST_THREADS];
}

void describe_meetings() {  // who waits where, when nobody can go on
    size_t used = size_t(snprintf(message, sizeof message, "block (%u, %u, %u) is stuck",
                                  blockIdx.x, blockIdx.y, blockIdx.z));
    for (int k = 0; k < count && used < sizeof message - 1; k++) {
        int same = 0, earlier = 0;
        for (int other = 0; other < count; other++) {
            bool with = fibers[k].state == ENDED ? fibers[other].state == ENDED
                                                 : same_meeting(fibers[k], fibers[other]);
            same += with;
            earlier += with && other < k;
        }
        if (earlier) continue;
        const Fiber& one = fibers[k];
        char where[600] = "ended";
        if (one.state != ENDED) {
            const char* slash = strrchr(one.file, '/');
            int length = snprintf(where, sizeof where, "at %s, %s:%d", one.what,
                                  slash ? slash + 1 : one.file, one.line);
            if (one.state == AT_WARP)
                snprintf(where + length, sizeof where - length, " with mask %#x", one.mask);
        }
        used += size_t(snprintf(message + used, sizeof message - used,
                                "; %d thread%s from thread %d %s", same, same > 1 ? "s" : "", k,
                                where));
    }
}

void abandon_block() {  // fibers in the middle of a kernel begin anew at the next launch
    for (Fiber* fiber = fibers; fiber < fibers + count; fiber++) {
        if (fiber->state == ENDED) continue;
        fiber->started = false;
        __asan_unpoison_memory_region(fiber->stack, STACK);
    }
}

// Writes over the redzones as well, hence neither memset nor instrumented stores.
__attribute__((no_sanitize("address", "undefined"))) void poison(char* from, char* end) {
    struct __attribute__((packed, may_alias)) Unaligned { Word bits; };
    for (; from + sizeof(Word) <= end; from += sizeof(Word))
        reinterpret_cast<volatile Unaligned*>(from)->bits = ~Word(0);
    for (; from < end; from++) *const_cast<volatile char*>(from) = char(0xFF);
}

bool run_block() {
    Fiber* group[MOST_THREADS];
    for (int k = 0; k < count; k++) {
        group[k] = &fibers[k];
        unsigned row = unsigned(k) / blockDim.x;
        fibers[k].index = {unsigned(k) % blockDim.x, row % blockDim.y, row / blockDim.y};
    }
    head = tail = 0;
    at_block = 0;
    live = count;
    order = random_state ? Order(random_below(3)) : FIRST;
    make_ready(group, unsigned(count));
    while (head != tail) resume(fibers[next_ready()]);
    return live == 0;
}

}  // namespace

void cuda_on_cpu::meet_block(const char* what, const char* file, int line) {
    Fiber& fiber = *current;
    fiber.state = AT_BLOCK;
    fiber.what = what, fiber.file = file, fiber.line = line, fiber.mask = ~0u;
    if (++at_block == live) release_block();
    leave();
}

void cuda_on_cpu::wait_for_another_block(const char* file, int line) {
    Fiber& fiber = *current;
    fiber.state = AT_BLOCK;
    fiber.what = "__nanosleep", fiber.file = file, fiber.line = line, fiber.mask = ~0u;
    leave();  // for ever: at_block does not count it
}

Word cuda_on_cpu::meet_warp(const char* what, unsigned mask, Word value, int source,
                            const char* file, int line) {
    Fiber& fiber = *current;
    fiber.state = AT_WARP;
    fiber.what = what, fiber.file = file, fiber.line = line, fiber.mask = mask;
    fiber.value = value, fiber.source = source;
    if (mask >> lane & 1) release_warp(fiber);  // a mask without its own lane waits for ever
    leave();
    return fiber.result;
}

// A null pointer, or what went wrong.
const char* cuda_on_cpu::run_grid(void (*thread)(void**), char* shared, char* shared_end,
                                  const unsigned* grid, const unsigned* block, void** args,
                                  Word seed, int in_order) {
    launch = {thread, args};
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    count = int(block[0] * block[1] * block[2]);
    random_state = seed * 0x9E3779B97F4A7C15u;
    for (int k = 0; k < count; k++) give_stack(fibers[k]);

    unsigned blocks = grid[0] * grid[1] * grid[2];
    unsigned* turn = static_cast<unsigned*>(malloc(blocks * sizeof(unsigned)));
    for (unsigned k = 0; k < blocks; k++) turn[k] = k;
    if (!in_order) mix(turn, blocks);
    bool done = true;
    for (unsigned k = 0; done && k < blocks; k++) {
        unsigned row = turn[k] / grid[0];
        blockIdx = {turn[k] % grid[0], row % grid[1], row / grid[1]};
        poison(shared, shared_end);
        done = run_block();
    }
    free(turn);
    if (done) return nullptr;
    describe_meetings();
    abandon_block();
    return message;
}
