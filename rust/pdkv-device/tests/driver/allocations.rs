//! The system's allocator, with a count of what each thread asks of it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often this thread has allocated so far. What the stand-in does, which is C++, is not in it.
pub(crate) fn allocations() -> u64 {
    COUNT.get()
}

// SAFETY: the system's allocator does all the work; the count is a plain number of the thread's own, made without allocating.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no count any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises; it came from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}
