// The C interface from Rust, as docs/c_api.md shows it.
use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int, c_void};
use std::ptr;

#[repr(C)]
pub struct Group {
    _private: [u8; 0],
}
#[repr(C)]
pub struct Site {
    _private: [u8; 0],
}

const I64: c_int = 3;
const SUM: c_int = 0;
const GROUP_TIMEOUT: i64 = -1;

#[link(name = "lockstep")]
extern "C" {
    fn lockstep_at(file: *const c_char, line: c_int) -> *const Site;
    fn lockstep_init(
        launcher: *const c_char,
        backend: *const c_char,
        timeout_ms: i64,
        site: *const Site,
    ) -> c_int;
    fn lockstep_destroy(failure: *const c_char, site: *const Site) -> c_int;
    fn lockstep_world(group: *mut *mut Group, site: *const Site) -> c_int;
    fn lockstep_group_rank(group: *const Group) -> c_int;
    fn lockstep_group_size(group: *const Group) -> c_int;
    fn lockstep_group_free(group: *mut Group);
    fn lockstep_all_reduce(
        group: *const Group,
        data: *mut c_void,
        count: usize,
        dtype: c_int,
        reduction: c_int,
        timeout_ms: i64,
        site: *const Site,
    ) -> c_int;
    fn lockstep_barrier(group: *const Group, timeout_ms: i64, site: *const Site) -> c_int;
    fn lockstep_error_message() -> *const c_char;
}

/// The line that calls the function which has `#[track_caller]`.
#[track_caller]
fn here() -> *const Site {
    let place = std::panic::Location::caller();
    let file = CString::new(place.file()).unwrap();
    unsafe { lockstep_at(file.as_ptr(), place.line() as c_int) }
}

fn check(status: c_int) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let text = unsafe { CStr::from_ptr(lockstep_error_message()) };
    Err(text.to_string_lossy().into_owned())
}

#[track_caller]
fn all_reduce(group: *const Group, data: &mut [i64]) -> Result<(), String> {
    let (at, count) = (data.as_mut_ptr() as *mut c_void, data.len());
    check(unsafe { lockstep_all_reduce(group, at, count, I64, SUM, GROUP_TIMEOUT, here()) })
}

fn run() -> Result<(), String> {
    let mut world = ptr::null_mut();
    check(unsafe { lockstep_init(ptr::null(), ptr::null(), 60000, here()) })?;
    check(unsafe { lockstep_world(&mut world, here()) })?;
    let (rank, size) = unsafe { (lockstep_group_rank(world), lockstep_group_size(world)) };
    let mut data = [rank as i64, 1];
    all_reduce(world, &mut data)?;
    let size = size as i64;
    assert_eq!(data, [size * (size - 1) / 2, size]);
    if std::env::args().nth(1).is_some() {
        if rank == 1 {
            check(unsafe { lockstep_barrier(world, GROUP_TIMEOUT, here()) })?;
        } else {
            all_reduce(world, &mut data)?;
        }
    }
    println!("rank {} of {}", rank, size);
    unsafe { lockstep_group_free(world) };
    check(unsafe { lockstep_destroy(ptr::null(), here()) })
}

fn main() {
    if let Err(text) = run() {
        println!("{}", text);
        std::process::exit(1);
    }
}
