# What is installed, by component, each of which is a package of LockstepPackages.cmake:
#   runtime          liblockstep.so.0, the C interface
#   openmpi, mpich   the module of the mpi engine for each MPI: src/engines/modules.cmake
#   ucx              the module of the ucx engine
#   tools            the command
#   dev              headers, the static library, the CMake package, pkg-config files
#   nn               the libtorch layer, so that a program of the core needs no libtorch
# A prefix may be moved: everything is found relative to it.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

install(TARGETS lockstep EXPORT lockstepTargets COMPONENT dev)
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${package_dir} COMPONENT dev)
install(TARGETS lockstep_c EXPORT lockstepCTargets
        LIBRARY COMPONENT runtime NAMELINK_COMPONENT dev)
install(EXPORT lockstepCTargets NAMESPACE lockstep:: DESTINATION ${package_dir} COMPONENT dev)
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev
        PATTERN nn EXCLUDE PATTERN nn.hpp EXCLUDE)

if(TARGET lockstep_nn)
  install(TARGETS lockstep_nn EXPORT lockstepNnTargets COMPONENT nn)
  install(EXPORT lockstepNnTargets NAMESPACE lockstep:: DESTINATION ${package_dir} COMPONENT nn)
  install(FILES include/lockstep/nn.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep COMPONENT nn)
  install(DIRECTORY include/lockstep/nn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep COMPONENT nn)
  install(FILES cmake/LockstepTorch.cmake DESTINATION ${package_dir} COMPONENT nn)
endif()

configure_package_config_file(cmake/lockstepConfig.cmake.in lockstepConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
              ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT dev)

cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
           BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE prefix_from_pkgconfig)
foreach(file lockstep.pc lockstep-cpp.pc)
  configure_file(cmake/${file}.in ${file} @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${file} DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
          COMPONENT dev)
endforeach()

if(PROJECT_IS_TOP_LEVEL)
  include(LockstepPackages)
endif()
