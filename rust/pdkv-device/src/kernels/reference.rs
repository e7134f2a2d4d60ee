//! The plain twin of the kernels: what a job does, one piece after the other. For tests and for `pdkv doctor`.

use super::checksum::Checksum;
use super::job::{Job, PageTables, Side};

/// Memory by address.
pub trait Memory {
    /// Reads all of `bytes` from `address` on.
    fn read(&self, address: u64, bytes: &mut [u8]);
    /// Writes all of `bytes` from `address` on.
    fn write(&mut self, address: u64, bytes: &[u8]);
}

/// Runs a job and adds to the checksums of its pages.
///
/// # Panics
/// When a table or `sums` has fewer entries than the job has pages, or a lane has longer pieces than the shape: a bug of the caller.
pub fn run(job: &Job, tables: &PageTables, memory: &mut impl Memory, sums: &mut [Checksum]) {
    let shape = &job.shape;
    let [outer, inner] = shape.axes;
    let mut longest = vec![0; shape.chunk_bytes as usize];
    for lane in &job.lanes {
        let chunk = &mut longest[..lane.bytes as usize];
        for page in 0..job.num_pages {
            let src = lane.src + page_offset(tables.src.as_deref(), page, &shape.src);
            let dst = lane.dst + page_offset(tables.dst.as_deref(), page, &shape.dst);
            for (o, i) in (0..outer.count).flat_map(|o| (0..inner.count).map(move |i| (u64::from(o), u64::from(i)))) {
                memory.read(src + o * outer.src_stride + i * inner.src_stride, chunk);
                memory.write(dst + o * outer.dst_stride + i * inner.dst_stride, chunk);
                let logical = lane.logical + o * outer.logical_stride + i * inner.logical_stride;
                sums[page as usize].add(logical, chunk);
            }
        }
    }
}

fn page_offset(pages: Option<&[u32]>, page: u32, side: &Side) -> u64 {
    let (entry, part) = (page / side.parts, page % side.parts);
    let id = pages.map_or(entry, |pages| pages[entry as usize]);
    u64::from(id) * side.page_stride + u64::from(part) * side.part_stride
}
